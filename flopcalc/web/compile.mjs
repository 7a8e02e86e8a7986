// Compiles the Python files of a zip with Pyodide's own Python: node compile.mjs PYODIDE-FOLDER ZIP NEW-ZIP
import { readFileSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, source, target] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(resolve(folder, "pyodide.mjs")).href);
const python = await loadPyodide({ indexURL: resolve(folder) });
python.FS.writeFile("/old.zip", readFileSync(source));
python.runPython(`
import os, py_compile, zipfile

CHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH  # the same source gives the same bytes
with zipfile.ZipFile("/old.zip") as old, zipfile.ZipFile("/new.zip", "w", zipfile.ZIP_STORED) as new:
    for info in old.infolist():
        name, data = info.filename, old.read(info)
        if name.endswith(".py"):
            with open("/one.py", "wb") as file:
                file.write(data)
            py_compile.compile("/one.py", "/one.pyc", dfile=name, doraise=True, invalidation_mode=CHECKED)
            with open("/one.pyc", "rb") as file:
                name, data = name + "c", file.read()
        made = zipfile.ZipInfo(name, info.date_time)
        made.external_attr = info.external_attr
        new.writestr(made, data)
`);
writeFileSync(target, python.FS.readFile("/new.zip"));
