// The page's state: set-ups, view and language. All of it is in the address, so that a link is the calculation.

export const VIEWS = ["flops", "conventions", "roofline", "time", "memory", "plan"];
const PAGE = ["view", "zoom", "op", "lang"];

export function makeState(defaults) {
  return { view: "flops", zoom: "", op: "", lang: "", setups: [{ ...defaults }], active: 0 };
}

export async function write(state) {
  const pieces = new URLSearchParams();
  for (const name of PAGE) if (state[name] && !(name === "view" && state.view === "flops")) pieces.set(name, state[name]);
  for (const [at, setup] of state.setups.entries()) {
    const prefix = at ? "b." : "";
    for (const [name, value] of Object.entries(setup)) {
      if (name === "files") {
        if (Object.keys(value).length) pieces.set(`${prefix}files`, await pack(value));
      } else if (Array.isArray(value)) {
        for (const each of value) pieces.append(prefix + name, each);
      } else if (value === true) {
        pieces.set(prefix + name, "1");
      } else if (value !== "" && value !== false && value !== undefined) {
        pieces.set(prefix + name, value);
      }
    }
    if (at && !Object.keys(setup).length) pieces.set("b.model", "");
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
  for (const [key, value] of pieces) {
    if (PAGE.includes(key)) {
      state[key] = value;
      continue;
    }
    const at = key.startsWith("b.") ? 1 : 0;
    const name = at ? key.slice(2) : key;
    state.setups[at] ??= {};
    const setup = state.setups[at];
    if (name === "files") setup.files = await unpack(value);
    else if (kinds.get(name) === "list") setup[name] = [...(setup[name] ?? []), value];
    else if (kinds.get(name) === "flag") setup[name] = value === "1";
    else setup[name] = value;
  }
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
    return JSON.parse(await new Response(stream).text());
  } catch {
    return { "config.json": "" }; // a damaged link: Python says that this is no config
  }
}
