// Amounts, names and times as people read them.

const UNITS = [[2 ** 40, 'TiB'], [2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']];

/** Bytes with one digit, such as "11.9 GiB". */
export function memory(bytes) {
  // Ten TiB and more in TiB: below, GiB compare better with the memory of one GPU.
  const [size, unit] = UNITS.find(([size]) => bytes >= size * (size === 2 ** 40 ? 10 : 1)) ?? [1, 'B'];
  const amount = bytes / size;
  const text = amount.toFixed(amount < 1000 ? 1 : 0).replace(/\.0$/, '');
  return `${thousands(text)} ${unit}`;
}

/** A part of an amount in one unit, such as "12 of 16 GiB". */
export function part(bytes, total) {
  const [number, unit] = memory(bytes).split(' ');
  const whole = memory(total);
  return whole.endsWith(` ${unit}`) ? `${number} of ${whole}` : `${bytes ? memory(bytes) : 0} of ${whole}`;
}

/** The memory that a pod uses, or its part of one GPU, marked if a container uses more than its share. */
export function usedMemory({used, overShare, memory: share}) {
  if (used === undefined) return 'unknown';
  // The rest of the pod, or its part of another GPU, may make up for it.
  return memory(used) + (!overShare ? '' : used > share ? ` (over ${memory(share)})` : ' (over in part)');
}

export function thousands(number) {
  return String(number).replace(/\B(?=(\d{3})+(?!\d)(?=\.|$))/g, ',');
}

export function count(number, noun) {
  return `${thousands(number)} ${noun}${number === 1 ? '' : 's'}`;
}

export function percent(part, whole) {
  if (!whole) return '0 %';
  const value = 100 * part / whole;
  return value > 0 && value < 1 ? 'under 1 %' : `${Math.round(value)} %`;
}

/** The name of a pod, or a part of its UID if this client may not see names. */
export function podName(pod) {
  return pod.name ? `${pod.namespace}/${pod.name}` : `pod ${pod.uid.slice(0, 8)}`;
}

export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString('en-GB');
}

/** The same without seconds; with the day if that is not today. */
export function minute(milliseconds) {
  const time = new Date(milliseconds);
  const text = time.toLocaleTimeString('en-GB', {hour: '2-digit', minute: '2-digit'});
  return time.toDateString() === new Date().toDateString() ? text : `${text}, ${time.toDateString().slice(4, 10)}`;
}

/** Notes the time that something took, for the browser's tools and for tests; old ones go, since a page stays open for weeks. */
let measures = 0;
export function measure(name, start) {
  if ((measures += 1) % 1000 === 0) performance.clearMeasures();
  performance.measure(name, {start});
}

/** An element with classes and children; strings become text, never markup. */
export function element(tag, classes = '', ...children) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  made.append(...children);
  return made;
}
