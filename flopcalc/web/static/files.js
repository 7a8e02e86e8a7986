// Files that people drop: configs and folders, launch files, and images, of which only the size is read.

import { says, t } from "./i18n.js";

const MOST_BYTES = 16_000_000;
const CONFIG = /config.*\.json$|^(modular_)?model_index\.json$/i;

// The files of a drop; folders are read one level deep.
export async function listDropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return { folder: "", files: [...transfer.files] };
  if (entries.length === 1 && entries[0].isDirectory) {
    const found = await readFolder(entries[0]);
    const deeper = await Promise.all(found.filter((each) => each.isDirectory).map(async (each) =>
      (await readFolder(each)).filter((entry) => entry.isFile).map((entry) => [`${each.name}/${entry.name}`, entry])));
    const named = [...found.filter((each) => each.isFile).map((each) => [each.name, each]), ...deeper.flat()];
    const chosen = named.filter(([name]) => CONFIG.test(name.split("/").pop()));
    const files = await Promise.all(chosen.map(async ([name, entry]) => rename(await readEntry(entry), name)));
    return { folder: entries[0].name, files };
  }
  return { folder: "", files: await Promise.all(entries.filter((each) => each.isFile).map(readEntry)) };
}

const readEntry = (entry) => new Promise((resolve, reject) => entry.file(resolve, reject));

function rename(file, name) {
  Object.defineProperty(file, "path", { value: name });
  return file;
}

async function readFolder(entry) {
  const reader = entry.createReader();
  const found = [];
  for (;;) { // a reader gives at most a hundred at once
    const part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!part.length) return found;
    found.push(...part);
  }
}

// What each file is good for: {configs: {name: text}, images: ["640x480"], launch: [name, text] or null, problems}.
export async function readFiles(files) {
  const result = { configs: {}, images: [], launch: null, problems: [] };
  for (const file of files) {
    const name = file.path ?? file.name;
    if (file.type.startsWith("image/")) {
      try {
        const picture = await createImageBitmap(file);
        result.images.push(`${picture.width}x${picture.height}`);
        picture.close();
      } catch {
        result.problems.push(says(name, t("files.image")));
      }
    } else if (file.size > MOST_BYTES) {
      result.problems.push(says(name, t("files.large", { most: MOST_BYTES })));
    } else if (name.endsWith(".json") && (CONFIG.test(name.split("/").pop()) || await isConfig(file))) {
      result.configs[name.replace(/[^\w./-]/g, "_")] = await file.text();
    } else if (/\.(ya?ml|toml|json)$/i.test(name)) {
      result.launch = [name, await file.text()];
    } else {
      result.problems.push(says(name, t("files.unknown")));
    }
  }
  return result;
}

// Whether a JSON file is a model's config, whatever its name is; another one may be a launch file.
async function isConfig(file) {
  const text = await file.text();
  return /"model_type"\s*:/.test(text) || !/"(per_device_train_batch_size|output_dir)"\s*:/.test(text);
}

// A config from the hub: the one request to another host, and only after a click.
export async function fetchHub(host, id) {
  if (!/^[\w.-]+\/[\w.-]+$/.test(id)) throw new Error(says(id, t("files.id")));
  const configs = {};
  for (const name of ["config.json", "preprocessor_config.json", "video_preprocessor_config.json"]) {
    const response = await fetch(`${host}/${id}/resolve/main/${name}`, { credentials: "omit", referrerPolicy: "no-referrer" });
    if (response.ok) configs[name] = await response.text();
    else if (name === "config.json") throw new Error(says(id, t("files.http", { status: response.status })));
  }
  return configs;
}
