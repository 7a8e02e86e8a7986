// Starts Python before anything else of the page is loaded.
export const firstWorker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
firstWorker.addEventListener("message", (event) => (firstWorker.early ??= []).push(event.data)); // until the page listens
