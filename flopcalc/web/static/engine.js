// Questions to Python: one at a time to each worker; of each channel only the newest waits.

export class Dropped extends Error {}

export class Engine {
  // `first` is a worker that runs already.
  constructor(onStatus = () => {}, first = null) {
    this.onStatus = onStatus;
    this.first = first;
    this.waiting = new Map(); // channel -> question that is not sent yet
    this.current = null; // the one that Python works on
    this.next = 0;
    this.worker = null;
    this.isReady = false;
    this.failure = ""; // why Python did not start
  }

  start() {
    if (this.worker) return;
    this.isReady = false;
    const worker = this.first ?? new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.first = null;
    for (const data of worker.early ?? []) queueMicrotask(() => this.hear(data));
    worker.addEventListener("message", ({ data }) => this.hear(data));
    worker.addEventListener("error", (event) => this.fail(event.message || "the worker did not start"));
    this.worker = worker;
  }

  // The answer to a question; a question of the same channel that still waits is dropped.
  ask(channel, question, onProgress = null) {
    this.start();
    if (this.failure) return Promise.reject(new Error(this.failure));
    this.waiting.get(channel)?.reject(new Dropped());
    return new Promise((resolve, reject) => {
      this.waiting.delete(channel);
      this.waiting.set(channel, { channel, question, onProgress, resolve, reject });
      this.send();
    });
  }

  // Stop whatever is asked: Python cannot be interrupted, so its worker ends and a new one starts.
  cancel() {
    const stopped = [...(this.current ? [this.current] : []), ...this.waiting.values()];
    this.current = null;
    this.waiting.clear();
    for (const each of stopped) each.reject(new Dropped());
    if (!stopped.length) return;
    this.worker?.terminate();
    this.worker = null;
    this.start();
  }

  send() {
    if (this.current || !this.isReady) return;
    const [first] = this.waiting.values();
    if (!first) return;
    this.waiting.delete(first.channel);
    this.current = { ...first, id: (this.next += 1) };
    this.worker.postMessage({ id: this.current.id, question: first.question });
  }

  hear(data) {
    if (data.ready) {
      this.isReady = true;
      this.times = data.times;
      this.onStatus("ready");
      this.send();
    } else if (data.failed) {
      this.fail(data.failed);
    } else if (this.current?.id === data.id) {
      if (data.progress) {
        this.current.onProgress?.(...data.progress);
        return;
      }
      const { resolve } = this.current;
      this.current = null;
      resolve(data.answer);
      this.send();
    }
  }

  fail(reason) {
    this.failure = reason;
    this.onStatus("failed", reason);
    for (const each of [...(this.current ? [this.current] : []), ...this.waiting.values()]) {
      each.reject(new Error(reason));
    }
    this.current = null;
    this.waiting.clear();
  }
}
