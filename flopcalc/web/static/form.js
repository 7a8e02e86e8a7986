// The form of one set-up: fields by section; every change goes to `onChange(name, value)`.
import { h } from "./dom.js";
import { t, word } from "./i18n.js";
import { Picker } from "./picker.js";

// What most visitors change stands first.
const FIRST = ["seq", "batch", "image", "device", "gpus", "step_time", "phase", "input_len", "output_len", "concurrency"];
// The commands whose fields a view shows, beside those of `estimate`; serving has its own alone.
const COMMANDS = { flops: [], curves: ["predict"], memory: ["predict"], time: ["predict"], roofline: ["predict"], plan: ["plan"], serving: ["serving"], conventions: ["translate"] };
export const KNOWN_DEVICES = ["h200-sxm", "h100-sxm", "b200-sxm", "a100-sxm-80gb", "mi300x", "l40s", "rtx-4090"]; // that many have
const SUGGESTED = { device: KNOWN_DEVICES, gpus: ["8", "64", "512"], tokens: ["100B", "1T", "15T"], input_len: ["1k", "8k"], output_len: ["256", "1k"] };
const OPTION = /--([a-z][a-z-]*)(?: (?:N|[A-Z_]{4,})\b)?/g; // with the word for its value, which a field has not

export class Form {
  constructor(root, data, { onChange, onModel, onFiles, onHub, onLaunch }) {
    this.root = root;
    this.data = data;
    this.fields = new Map();
    this.unused = []; // names that say nothing about the model
    this.onChange = onChange;
    this.build({ onModel, onFiles, onHub, onLaunch });
  }

  build(handlers) {
    const open = new Map([...this.root.querySelectorAll("details[data-section]")].map((each) => [each.dataset.section, each.open]));
    this.fields.clear();
    this.table = new Map(this.data.form.flatMap(({ fields }) => fields.map((field) => [field.name, field])));
    const first = FIRST.filter((name) => this.table.has(name)).map((name) => this.makeField(this.table.get(name)));
    // On a narrow screen the answer comes next; what few people change is one press away.
    const isWide = matchMedia("(min-width: 60rem)").matches;
    this.root.replaceChildren(this.makePicker(handlers), h("div", { class: "fields first" }, first), h("details", { class: "more", "data-section": "more", open: open.get("more") ?? isWide },
      h("summary", {}, t("section.more")), this.makeModel(handlers),
      this.data.form.map(({ name, fields }) => {
        const others = fields.filter((field) => !FIRST.includes(field.name));
        return others.length ? h("details", { "data-section": name, open: open.get(name) ?? false },
          h("summary", {}, t(`section.${name}`)), h("div", { class: "fields" }, others.map((field) => this.makeField(field)))) : null;
      })));
  }

  makePicker({ onModel }) {
    const picker = new Picker(this.data.presets, onModel);
    this.picker = picker;
    this.fields.set("model", { write: (value) => picker.write(value ?? "") });
    return h("div", { class: "model field", "data-field": "model" },
      h("label", { for: "f-model" }, t("field.model")), picker.element,
      h("p", { class: "help", id: "model-help" }, t("model.help", { count: this.data.presets.length })));
  }

  makeModel({ onFiles, onHub, onLaunch }) {
    const data = this.data;
    const files = h("input", {
      id: "f-files", type: "file", multiple: true, accept: ".json,.toml,.yaml,.yml,image/*", class: "hidden-file",
      onchange: (event) => onFiles([...event.target.files]),
    });
    const pasted = h("textarea", { id: "f-paste", rows: "4", spellcheck: "false", placeholder: '{"model_type": "llama", …}' });
    const hub = h("input", { id: "f-hub", spellcheck: "false", autocomplete: "off", placeholder: "Qwen/Qwen2.5-7B" });
    const launch = h("textarea", { id: "f-launch", rows: "4", spellcheck: "false", placeholder: "base_model: Qwen/Qwen3-8B\nsequence_len: 4096\n…" });
    this.chosen = h("p", { class: "chosen", id: "chosen-files" });
    return h("div", { class: "model" },
      h("div", { class: "drop", id: "drop" },
        h("label", { for: "f-files", class: "button" }, t("model.files")), files, h("span", { class: "minor" }, t("model.drop"))),
      this.chosen,
      h("details", { "data-section": "paste" }, h("summary", {}, t("model.paste")),
        h("label", { for: "f-paste" }, t("model.paste.label")), pasted,
        h("button", { type: "button", id: "use-paste", onclick: () => onFiles([new File([pasted.value], "config.json")]) }, t("model.use"))),
      h("details", { "data-section": "launch" }, h("summary", {}, t("model.launch")),
        h("label", { for: "f-launch" }, t("model.launch.label")), launch,
        h("button", { type: "button", id: "use-launch", onclick: () => onLaunch("launch.yaml", launch.value) }, t("model.use"))),
      h("details", { "data-section": "hub" }, h("summary", {}, t("model.hub")),
        h("label", { for: "f-hub" }, t("model.hub.label", { host: new URL(data.hub).host })), hub,
        h("button", { type: "button", id: "use-hub", onclick: () => onHub(hub.value.trim()) }, t("model.fetch"))));
  }

  // A field's name as the page writes it.
  label(name) {
    return word(`field.${name}`, name);
  }

  // A message of Python with the page's own names in place of options: --max-pixels 1M -> "Processor's max_pixels" 1M.
  reword(text) {
    return text.replace(OPTION, (whole, option) => (this.fields.has(nameField(option)) ? t("quoted", { name: this.label(nameField(option)) }) : whole));
  }

  // The field that a message is about: the first that it names.
  findField(text) {
    const options = [...text.matchAll(OPTION)].map(([, option]) => nameField(option));
    const first = /^([a-z_]+)\b/.exec(text)?.[1] ?? "";
    return [...options, first].find((name) => this.fields.has(name) && name !== "model") ?? "";
  }

  place(name) {
    return this.root.querySelector(`[data-field="${name}"]`);
  }

  reveal(name) {
    const place = this.place(name);
    place.hidden = false;
    for (let each = place.closest("details"); each; each = each.parentElement.closest("details")) each.open = true;
    return place;
  }

  // Nothing is typed any more: another address decides.
  leave() {
    this.picker.stop();
    if (this.root.contains(document.activeElement)) document.activeElement.blur();
  }

  // Show a field and put the cursor into it.
  open(name) {
    const place = this.reveal(name);
    place.querySelector("input, select, textarea").focus();
  }

  // One message at its field; null takes the last one away.
  showError(name, text = "", action = null) {
    for (const each of this.root.querySelectorAll(".field-error")) each.remove();
    for (const each of this.root.querySelectorAll("[aria-invalid]")) {
      each.removeAttribute("aria-invalid");
      each.removeAttribute("aria-errormessage");
    }
    if (!name) return;
    const place = this.reveal(name);
    const input = place.querySelector("input, select");
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-errormessage", `e-${name}`);
    place.append(h("p", { class: "error field-error", id: `e-${name}`, role: "alert" }, text, action));
  }

  // Fields that the view or the model cannot use are hidden; an open choice shows what it means.
  fit(view, answer) {
    this.unused = answer?.unused ?? this.unused;
    const commands = view === "serving" ? COMMANDS.serving : ["estimate", ...COMMANDS[view]];
    for (const [name, field] of this.fields) {
      if (name === "model") continue;
      const isTaken = this.table.get(name).commands.some((each) => commands.includes(each));
      this.place(name).hidden = !isTaken || (this.unused.includes(name) && !field.hasValue());
    }
    for (const section of this.root.querySelectorAll("details[data-section]")) {
      const fields = [...section.querySelectorAll("[data-field]")];
      if (fields.length) section.hidden = fields.every((each) => each.hidden);
    }
    const { estimate } = answer ?? {};
    const phase = this.root.querySelector("#f-phase option[value='']");
    if (phase && estimate) phase.textContent = t("word.defaultIs", { value: word(`word.phase.${estimate.workload.phase}`, estimate.workload.phase) });
  }

  // A field once more, where a view asks for it; with values that many choose.
  makeCopy(name, onChange) {
    const field = this.table.get(name);
    const options = this.listOptions(field);
    const id = `ask-${name}`;
    const give = (value) => value && onChange(value);
    const input = options ? h("select", { id, onchange: (event) => give(event.target.value) }, options.map(([value, text]) => h("option", { value }, text)))
      : h("input", { id, autocomplete: "off", placeholder: field.hint || null, onchange: (event) => give(event.target.value.trim()) });
    return h("div", { class: "field" }, h("label", { for: id }, this.label(name)), input,
      h("div", { class: "buttons" }, (SUGGESTED[name] ?? []).filter((value) => !options || options.some(([each]) => each === value)).map((value) =>
        h("button", { type: "button", class: "small", onclick: () => give(value) }, options?.find(([each]) => each === value)?.[1] ?? value))));
  }

  makeField(field) {
    const { name, kind, slider = null, hint = "", first = "" } = field;
    const id = `f-${name}`;
    const label = h("label", { for: id }, word(`field.${name}`, name));
    const change = (value) => this.onChange(name, value);
    if (kind === "flag") {
      const box = h("input", { id, type: "checkbox", onchange: (event) => change(event.target.checked) });
      this.fields.set(name, { write: (value) => { box.checked = Boolean(value); }, hasValue: () => box.checked });
      return h("div", { class: "field flag", "data-field": name }, box, label);
    }
    const options = this.listOptions(field);
    if (options) {
      const select = h("select", { id, onchange: (event) => change(event.target.value) },
        options.map(([value, text]) => h("option", { value }, text)));
      this.fields.set(name, { write: (value) => {
        const wanted = value || first;
        if (![...select.options].some((each) => each.value === wanted)) select.append(h("option", { value: wanted }, wanted));
        select.value = wanted;
      }, hasValue: () => select.value !== first });
      return h("div", { class: "field", "data-field": name }, label, select);
    }
    const isList = kind === "list";
    const input = h("input", { id, autocomplete: "off", spellcheck: "false", placeholder: hint || null,
      oninput: (event) => change(isList ? splitList(event.target.value) : event.target.value) });
    if (!slider) {
      this.fields.set(name, { write: (value) => write(input, isList ? (value ?? []).join(" ") : value ?? ""), hasValue: () => input.value !== "" });
      return h("div", { class: "field", "data-field": name }, label, input);
    }
    const [low, high] = slider;
    const range = h("input", { type: "range", min: low, max: high, step: name === "seq" ? "0.125" : "1", class: "slider",
      id: `${id}-slider`, "aria-label": t("field.slider", { name: t(`field.${name}`) }),
      oninput: (event) => {
        const value = String(Math.round(2 ** Number(event.target.value)));
        input.value = value;
        range.setAttribute("aria-valuetext", value);
        change(value);
      } });
    this.fields.set(name, { write: (value) => {
      write(input, value ?? "");
      const size = readSize(value);
      if (document.activeElement !== range) range.value = String(Math.log2(size || 1));
      range.setAttribute("aria-valuetext", String(size || 1));
    }, hasValue: () => input.value !== "" });
    return h("div", { class: "field", "data-field": name }, label, input, range);
  }

  listOptions({ name, kind, words, optional }) {
    const data = this.data;
    if (kind === "select") {
      const named = words.map((value) => [value, word(`word.${name}.${value}`, value)]);
      return optional ? [["", t("word.default")], ...named] : named;
    }
    const none = ["", t("word.default")];
    if (kind === "format") return [none, ...data.formats.map((value) => [value, value])];
    if (kind === "quoted") return [["", t("word.unknown")], ...data.quoted.map((value) => [value, value])];
    if (kind === "device") return [["", t("word.none")], ...data.devices.map((each) => [each.id, each.name])];
    if (kind === "interconnect") return [none, ...data.interconnects.map((each) => [each.id, each.name])];
    return null;
  }

  show(setup) {
    for (const [name, field] of this.fields) field.write(setup[name]);
    const names = Object.keys(setup.files ?? {});
    this.chosen.textContent = names.length ? t("model.chosen", { names: names.join(", ") }) : "";
    this.chosen.hidden = !names.length;
  }
}

function nameField(option) {
  const name = option.replaceAll("-", "_");
  return { compile: "execution", gradient_checkpointing: "recompute", dtype: "compute" }[name] ?? name;
}

function write(input, value) {
  if (document.activeElement !== input || input.value.trim() === "") input.value = value;
}

const splitList = (text) => text.split(/\s+/).filter(Boolean);

function readSize(text) {
  const match = /^\s*(\d+(?:\.\d+)?)\s*([km]?)\s*$/i.exec(text ?? "");
  return match ? Number(match[1]) * { "": 1, k: 1024, m: 1048576 }[match[2].toLowerCase()] : 0;
}
