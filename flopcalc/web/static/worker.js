// Python in a worker: loads Pyodide and flopcalc, then answers one question at a time.
import createPyodideModule from "./pyodide/pyodide.asm.js";
import { loadPyodide } from "./pyodide/pyodide.js";

const HOME = "/lib/flopcalc-site";
const archive = fetch("./flopcalc.zip").then((response) => {
  if (!response.ok) throw new Error(`flopcalc.zip: HTTP ${response.status}`);
  return response.arrayBuffer();
}); // while Pyodide starts

async function start() {
  const started = performance.now();
  new WebAssembly.Module(Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0)); // an empty one: throws where a policy forbids it
  const python = await loadPyodide({
    indexURL: new URL("./pyodide/", import.meta.url).href,
    createPyodideModule,
    // Nothing is ever installed from an index: the lock of packages is empty.
    lockFileContents: {
      info: { abi_version: "2026_0", arch: "wasm32", platform: "emscripten_5_0_3", python: "3.14.2" },
      packages: {},
    },
    packageBaseUrl: new URL("./pyodide/", import.meta.url).href,
  });
  const booted = performance.now();
  python.unpackArchive(await archive, "zip", { extractDir: HOME });
  const unpacked = performance.now();
  python.runPython(`
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, "${HOME}")
from flopcalc.web.answers import answer
`);
  const answer = python.globals.get("answer");
  postMessage({ ready: true, times: { pyodide: booted - started, unpack: unpacked - booted, imports: performance.now() - unpacked } });
  return answer;
}

const fail = (error) => postMessage({ failed: String(error?.message ?? error) });
const ready = start().catch((error) => {
  fail(error);
  return null;
});

addEventListener("message", async ({ data: { id, question } }) => {
  const answer = await ready;
  const progress = (done, whole) => postMessage({ id, progress: [done, whole] });
  try {
    const text = question.what === "plan" ? answer(JSON.stringify(question), progress) : answer(JSON.stringify(question));
    postMessage({ id, answer: JSON.parse(text) });
  } catch (error) {
    // A bug in Python: its last line is what helps.
    const lines = String(error.message ?? error).trim().split("\n");
    postMessage({ id, answer: { error: lines[lines.length - 1], bug: String(error.message ?? error) } });
  }
});
