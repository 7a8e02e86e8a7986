// The page's state: set-ups, view and language. All of it is in the address, so that a link is the calculation.

export const VIEWS = ["flops", "curves", "memory", "time", "roofline", "plan", "serving", "conventions"];
export const LETTERS = ["A", "B", "C", "D", "E", "F"]; // set-ups side by side; all but the first have theirs in the address
const PAGE = ["view", "zoom", "op", "lang", "over", "of"];
const SETUP = new RegExp(`^([${LETTERS.slice(1).join("").toLowerCase()}])\\.`);
const prefix = (at) => (at ? `${LETTERS[at].toLowerCase()}.` : "");

export function makeState(defaults) {
  return { view: "flops", zoom: "", op: "", lang: "", over: "", of: "", setups: [{ ...defaults }], active: 0 };
}

export async function write(state) {
  const pieces = new URLSearchParams();
  for (const name of PAGE) if (state[name] && !(name === "view" && state.view === "flops")) pieces.set(name, state[name]);
  for (const [at, setup] of state.setups.entries()) {
    for (const [name, value] of Object.entries(setup)) {
      if (name === "files") {
        if (Object.keys(value).length) pieces.set(`${prefix(at)}files`, await pack(value));
      } else if (Array.isArray(value)) {
        for (const each of value) pieces.append(prefix(at) + name, each);
      } else if (value === true) {
        pieces.set(prefix(at) + name, "1");
      } else if (value !== "" && value !== false && value !== undefined) {
        pieces.set(prefix(at) + name, value);
      }
    }
    if (at && !Object.keys(setup).length) pieces.set(`${prefix(at)}model`, "");
  }
  return pieces.toString();
}

// What an address says; null where it says nothing. The form's fields say which values are lists and flags. Unknown names
// are left to Python, which names them in its error.
export async function read(text, defaults, form) {
  const kinds = new Map(form.flatMap(({ fields }) => fields.map(({ name, kind }) => [name, kind])));
  const pieces = new URLSearchParams(text);
  if (![...pieces.keys()].length) return null;
  const state = { ...makeState({}), setups: [{}] };
  const others = new Map(); // letter -> set-up
  for (const [key, value] of pieces) {
    if (PAGE.includes(key)) {
      state[key] = value;
      continue;
    }
    const letter = SETUP.exec(key)?.[1] ?? "";
    const name = letter ? key.slice(2) : key;
    if (letter && !others.has(letter)) others.set(letter, {});
    const setup = letter ? others.get(letter) : state.setups[0];
    if (name === "files") setup.files = await unpack(value);
    else if (kinds.get(name) === "list") setup[name] = [...(setup[name] ?? []), value];
    else if (kinds.get(name) === "flag") setup[name] = value === "1";
    else setup[name] = value;
  }
  state.setups.push(...[...others.keys()].sort().map((letter) => others.get(letter)));
  if (!VIEWS.includes(state.view)) state.view = "flops";
  if (!Object.keys(state.setups[0]).length) state.setups[0] = { ...defaults };
  return state;
}

const packed = new Map(); // what was packed last: an address is written often, a config changes seldom

async function pack(files) {
  const text = JSON.stringify(files);
  if (!packed.has(text)) {
    const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
    const data = new Uint8Array(await new Response(stream).arrayBuffer());
    let binary = "";
    for (const byte of data) binary += String.fromCharCode(byte);
    packed.clear();
    packed.set(text, btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", ""));
  }
  return packed.get(text);
}

async function unpack(text) {
  try {
    const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    const data = Uint8Array.from(binary, (each) => each.charCodeAt(0));
    const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    const files = JSON.parse(await new Response(stream).text());
    if (Object.prototype.toString.call(files) === "[object Object]") return files;
  } catch {
    // a damaged link
  }
  return { "config.json": "" }; // Python says that this is no config
}
