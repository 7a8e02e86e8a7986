// The files of a zip archive: [name, bytes] of each, inflated by the browser itself.

const DIRECTORY_END = 0x06054b50;

export async function unzip(buffer) {
  const view = new DataView(buffer);
  let end = buffer.byteLength - 22;
  while (view.getUint32(end, true) !== DIRECTORY_END) end -= 1;
  const files = [];
  let at = view.getUint32(end + 16, true);
  for (let left = view.getUint16(end + 10, true); left > 0; left -= 1) {
    const [method, size] = [view.getUint16(at + 10, true), view.getUint32(at + 20, true)];
    const [name, extra, comment] = [view.getUint16(at + 28, true), view.getUint16(at + 30, true), view.getUint16(at + 32, true)];
    const header = view.getUint32(at + 42, true);
    const start = header + 30 + view.getUint16(header + 26, true) + view.getUint16(header + 28, true);
    files.push([new TextDecoder().decode(new Uint8Array(buffer, at + 46, name)), method, new Uint8Array(buffer, start, size)]);
    at += 46 + name + extra + comment;
  }
  return Promise.all(files.map(async ([path, method, data]) => [path, method ? await inflate(data) : data]));
}

async function inflate(data) {
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
