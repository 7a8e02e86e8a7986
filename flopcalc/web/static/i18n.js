// The page's words: one JSON file for each language; English is there where a word is missing.

export const LANGUAGES = { en: "English", zh: "中文" };
let words = {};
let fallback = {};
let python = {}; // what Python writes in English, in the page's language

async function read(language) {
  const response = await fetch(new URL(`./strings/${language}.json`, import.meta.url));
  if (!response.ok) throw new Error(`strings/${language}.json: HTTP ${response.status}`);
  return response.json();
}

export function choose(wanted) {
  if (Object.hasOwn(LANGUAGES, wanted)) return wanted;
  return navigator.languages?.some((each) => each.toLowerCase().startsWith("zh")) &&
    !navigator.languages[0].toLowerCase().startsWith("en") ? "zh" : "en";
}

export async function load(language) {
  if (!Object.keys(fallback).length) fallback = await read("en");
  words = language === "en" ? fallback : await read(language);
  python = language === "en" ? {} : await read(`python/${language}`);
  document.documentElement.lang = language === "zh" ? "zh-Hans" : language;
}

export function t(key, values = {}) {
  const text = words[key] ?? fallback[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

// A word that may have no translation, such as a module's kind: itself then.
export const word = (key, plain) => words[key] ?? fallback[key] ?? plain;

// A step in words, as Python writes it: "train, 1 × 4096 tokens".
export const sayWork = (text) => (python.work ?? []).reduce((said, [pattern, by]) => said.replace(new RegExp(pattern, "g"), by), text);

// What a convention counts, or leaves out.
export const sayCounts = (what, name, plain) => python[what]?.[name] ?? plain;

// "name: text" and "one, two" with the language's own marks.
export const says = (name, text) => t("mark.says", { name, text });
export const list = (...parts) => parts.filter(Boolean).join(t("mark.list"));

export function translatePage(root = document) {
  for (const element of root.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  for (const element of root.querySelectorAll("[data-t-label]")) {
    element.setAttribute("aria-label", t(element.dataset.tLabel));
  }
}
