// A field that searches the presets: each with its size, family and kind; any other text stays as it was typed.
import { h } from "./dom.js";
import { t, word } from "./i18n.js";

const MOST = 80; // rows of the list
const PAUSE_MS = 600; // after the last key of a name that is no preset

export class Picker {
  constructor(presets, onPick) {
    this.presets = presets.map((preset) => ({ ...preset, text: describe(preset).join(" ").toLowerCase() }));
    this.onPick = onPick;
    this.value = ""; // the model that is chosen
    this.at = -1; // the row that the arrow keys reached
    this.waiting = 0;
    this.list = h("ul", { id: "presets", role: "listbox", "aria-label": t("field.model"), hidden: true });
    this.input = h("input", {
      id: "f-model", role: "combobox", "aria-expanded": "false", "aria-controls": "presets", "aria-autocomplete": "list",
      autocomplete: "off", spellcheck: "false", placeholder: "llama-3.1-8b", "aria-describedby": "model-help",
      oninput: () => this.type(), onkeydown: (event) => this.press(event), onfocus: () => this.input.select(),
      onclick: () => this.show(""), onblur: () => this.leave(),
    });
    this.element = h("div", { class: "picker" }, this.input, this.list);
  }

  write(value) {
    this.value = value;
    if (document.activeElement !== this.input || this.input.value.trim() === "") this.input.value = value;
  }

  // Rows that hold every word of the text.
  show(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const miss = ({ name }) => words.filter((each) => !name.includes(each)).length; // "8b" is in "14.8b", which is a size
    this.found = this.presets.filter((preset) => words.every((each) => preset.text.includes(each)));
    if (words.length) this.found.sort((one, other) => miss(one) - miss(other) || one.name.length - other.name.length);
    this.at = -1;
    this.list.replaceChildren(...this.found.slice(0, MOST).map((preset, at) => {
      const [name, size, family, kind] = describe(preset);
      return h("li", { role: "option", id: `preset-${at}`, "aria-selected": "false", onmousedown: (event) => {
        event.preventDefault(); // the field keeps the focus until the row is taken
        this.take(preset.name);
      } }, h("span", { class: "name" }, name), h("span", { class: "minor" }, `${size} · ${family} · ${kind}`));
    }));
    if (this.found.length > MOST) this.list.append(h("li", { class: "minor", role: "presentation" }, t("picker.more", { count: this.found.length - MOST })));
    this.open(this.found.length > 0);
  }

  open(isOpen) {
    this.list.hidden = !isOpen;
    this.input.setAttribute("aria-expanded", String(isOpen));
    if (!isOpen) this.input.removeAttribute("aria-activedescendant");
  }

  type() {
    const value = this.input.value.trim();
    clearTimeout(this.waiting);
    this.show(value);
    if (this.presets.some((preset) => [preset.name, preset.hub_id, ...preset.aliases].includes(value))) this.onPick(value);
    else if (value) this.waiting = setTimeout(() => this.onPick(value), PAUSE_MS);
  }

  press(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      if (this.list.hidden) this.show("");
      const rows = [...this.list.querySelectorAll("[role=option]")];
      if (!rows.length) return;
      rows[this.at]?.setAttribute("aria-selected", "false");
      this.at = (this.at + step + rows.length) % rows.length;
      rows[this.at].setAttribute("aria-selected", "true");
      rows[this.at].scrollIntoView({ block: "nearest" });
      this.input.setAttribute("aria-activedescendant", rows[this.at].id);
    } else if (event.key === "Enter") {
      event.preventDefault();
      this.take(this.at >= 0 ? this.found[this.at].name : this.input.value.trim());
    } else if (event.key === "Escape") {
      this.stop();
      this.input.value = this.value;
    }
  }

  // What is typed is not taken.
  stop() {
    clearTimeout(this.waiting);
    this.waiting = 0;
    this.open(false);
  }

  leave() {
    this.open(false);
    if (!this.waiting) return;
    clearTimeout(this.waiting);
    this.waiting = 0;
    this.onPick(this.input.value.trim());
  }

  take(name) {
    this.stop();
    this.input.value = name;
    this.onPick(name);
  }
}

const size = (parameters) => (parameters >= 1e9 ? `${(parameters / 1e9).toFixed(1)}B` : `${Math.round(parameters / 1e6)}M`);

// Name (with its other names), size, family and kind of a preset.
function describe(preset) {
  const kind = preset.type.endsWith("Pipeline") ? "diffusion" : preset.input;
  return [[preset.name, ...preset.aliases].join(" = "), size(preset.parameters), preset.type, word(`kind.of.${kind}`, kind)];
}
