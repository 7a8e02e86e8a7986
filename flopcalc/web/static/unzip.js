// The files of a zip archive whose entries are not compressed: [name, bytes] of each, without copying.
// A thousand small files inflate slowly in a browser; the server or nobody compresses the archive.

const DIRECTORY_END = 0x06054b50;

export function unzip(buffer) {
  const view = new DataView(buffer);
  const decoder = new TextDecoder();
  let end = buffer.byteLength - 22;
  while (view.getUint32(end, true) !== DIRECTORY_END) end -= 1;
  const files = [];
  let at = view.getUint32(end + 16, true);
  for (let left = view.getUint16(end + 10, true); left > 0; left -= 1) {
    if (view.getUint16(at + 10, true)) throw new Error("flopcalc.zip: an entry is compressed");
    const size = view.getUint32(at + 20, true);
    const [name, extra, comment] = [view.getUint16(at + 28, true), view.getUint16(at + 30, true), view.getUint16(at + 32, true)];
    const header = view.getUint32(at + 42, true);
    const start = header + 30 + view.getUint16(header + 26, true) + view.getUint16(header + 28, true);
    files.push([decoder.decode(new Uint8Array(buffer, at + 46, name)), new Uint8Array(buffer, start, size)]);
    at += 46 + name + extra + comment;
  }
  return files;
}
