// Starts Python before anything else of the page is loaded; what it says is kept until the page listens.
export const firstWorker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
firstWorker.early = [];
firstWorker.addEventListener("message", (event) => firstWorker.early.push(event.data));
firstWorker.addEventListener("error", (event) => firstWorker.early.push({ failed: event.message || "the worker did not start" }));
