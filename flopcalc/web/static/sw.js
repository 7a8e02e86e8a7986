// The service worker: keeps the whole site in a cache of this version, so that the next visit needs no network.
const VERSION = "flopcalc-__VERSION__";
const FILES = "__FILES__";

addEventListener("install", (event) => {
  event.waitUntil(caches.open(VERSION).then((cache) => cache.addAll(FILES)));
});

addEventListener("activate", (event) => {
  event.waitUntil(
    caches.keys().then((names) => {
      const old = names.filter((name) => name.startsWith("flopcalc-") && name !== VERSION);
      return Promise.all(old.map((name) => caches.delete(name)));
    }).then(() => clients.claim()),
  );
});

addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  if (event.request.method !== "GET" || url.origin !== location.origin) return;
  event.respondWith(
    caches.open(VERSION)
      .then((cache) => cache.match(event.request, { ignoreSearch: true }))
      .then((found) => found ?? fetch(event.request)),
  );
});
