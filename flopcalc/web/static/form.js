// The form of one set-up: fields by section; every change goes to `onChange(name, value)`.
import { h } from "./dom.js";
import { t, word } from "./i18n.js";

const OPEN = ["work", "hardware"]; // sections that a wide screen shows open

export class Form {
  constructor(root, data, { onChange, onModel, onFiles, onHub, onLaunch }) {
    this.root = root;
    this.data = data;
    this.fields = new Map();
    this.onChange = onChange;
    this.build({ onModel, onFiles, onHub, onLaunch });
  }

  build(handlers) {
    const open = new Map([...this.root.querySelectorAll("details[data-section]")].map((each) => [each.dataset.section, each.open]));
    const isWide = matchMedia("(min-width: 60rem)").matches; // on a phone the result comes after a short form
    this.fields.clear();
    this.root.replaceChildren(this.makeModel(handlers), ...this.data.form.map(({ name, fields }) =>
      h("details", { "data-section": name, open: open.get(name) ?? (OPEN.includes(name) && isWide) },
        h("summary", {}, t(`section.${name}`)),
        h("div", { class: "fields" }, fields.map((field) => this.makeField(field))))));
  }

  makeModel({ onModel, onFiles, onHub, onLaunch }) {
    const data = this.data;
    const options = data.presets.flatMap((preset) => [
      h("option", { value: preset.name }, `${(preset.parameters / 1e9).toFixed(2)}B, ${preset.type}`),
      ...preset.aliases.map((alias) => h("option", { value: alias }, `= ${preset.name}`)),
    ]);
    const input = h("input", {
      id: "f-model", list: "presets", autocomplete: "off", spellcheck: "false", placeholder: "llama-3.1-8b",
      "aria-describedby": "model-help", oninput: (event) => onModel(event.target.value),
    });
    this.fields.set("model", { write: (value) => write(input, value ?? "") });
    const files = h("input", {
      id: "f-files", type: "file", multiple: true, accept: ".json,.toml,.yaml,.yml,image/*", class: "hidden-file",
      onchange: (event) => onFiles([...event.target.files]),
    });
    const pasted = h("textarea", { id: "f-paste", rows: "4", spellcheck: "false", placeholder: '{"model_type": "llama", …}' });
    const hub = h("input", { id: "f-hub", spellcheck: "false", autocomplete: "off", placeholder: "Qwen/Qwen2.5-7B" });
    const launch = h("textarea", { id: "f-launch", rows: "4", spellcheck: "false", placeholder: "base_model: Qwen/Qwen3-8B\nsequence_len: 4096\n…" });
    this.chosen = h("p", { class: "chosen", id: "chosen-files" });
    return h("div", { class: "model" },
      h("label", { for: "f-model" }, t("field.model")), input,
      h("datalist", { id: "presets" }, options),
      h("p", { class: "help", id: "model-help" }, t("model.help", { count: data.presets.length })),
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

  makeField(field) {
    const { name, kind, slider = null, hint = "", first = "" } = field;
    const id = `f-${name}`;
    const label = h("label", { for: id }, word(`field.${name}`, name));
    const change = (value) => this.onChange(name, value);
    if (kind === "flag") {
      const box = h("input", { id, type: "checkbox", onchange: (event) => change(event.target.checked) });
      this.fields.set(name, { write: (value) => { box.checked = Boolean(value); } });
      return h("div", { class: "field flag" }, box, label);
    }
    const options = this.listOptions(field);
    if (options) {
      const select = h("select", { id, onchange: (event) => change(event.target.value) },
        options.map(([value, text]) => h("option", { value }, text)));
      this.fields.set(name, { write: (value) => {
        const wanted = value || first;
        if (![...select.options].some((each) => each.value === wanted)) select.append(h("option", { value: wanted }, wanted));
        select.value = wanted;
      } });
      return h("div", { class: "field" }, label, select);
    }
    const isList = kind === "list";
    const input = h("input", { id, autocomplete: "off", spellcheck: "false", placeholder: hint || null,
      oninput: (event) => change(isList ? splitList(event.target.value) : event.target.value) });
    if (!slider) {
      this.fields.set(name, { write: (value) => write(input, isList ? (value ?? []).join(" ") : value ?? "") });
      return h("div", { class: "field" }, label, input);
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
    } });
    return h("div", { class: "field" }, label, input, range);
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

function write(input, value) {
  if (document.activeElement !== input || input.value.trim() === "") input.value = value;
}

const splitList = (text) => text.split(/\s+/).filter(Boolean);

function readSize(text) {
  const match = /^\s*(\d+(?:\.\d+)?)\s*([km]?)\s*$/i.exec(text ?? "");
  return match ? Number(match[1]) * { "": 1, k: 1024, m: 1048576 }[match[2].toLowerCase()] : 0;
}
