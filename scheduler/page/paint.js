// Colours and patterns of the pictures. Every colour that means something has a pattern too, for people who do not tell them apart.

import {freeMemory, isUnusable} from './cluster.js';
import {memory, podName, thousands} from './format.js';

/** Reasons for which a GPU has no room: a colour of page.css and a pattern for each; more reasons share the last. */
const REASONS = [
  ['--reason-1', 'rising'], ['--reason-2', 'dots'], ['--reason-3', 'falling'], ['--reason-4', 'crossed'],
  ['--reason-5', 'level'], ['--reason-6', 'upright'], ['--reason-7', 'checked'],
];

/** The namespaces that have a colour of page.css of their own; further ones share the last. */
const NAMESPACES = 6;

/** Lines and dots of each pattern on a square of 8 pixels. */
const PATTERNS = {
  rising: [[0, 8, 8, 0], [-2, 2, 2, -2], [6, 10, 10, 6]],
  falling: [[0, 0, 8, 8], [-2, 6, 2, 10], [6, -2, 10, 2]],
  crossed: [[0, 0, 8, 8], [0, 8, 8, 0]],
  level: [[0, 2, 8, 2], [0, 6, 8, 6]],
  upright: [[2, 0, 2, 8], [6, 0, 6, 8]],
  dots: [[1, 2, 3, 2], [5, 6, 7, 6]],
  checked: [[0, 2, 4, 2], [4, 6, 8, 6]],
};

/** Colours of bars that are too thin for a pattern. */
const SMALL = {free: '--free', stranded: '--stranded', unhealthy: '--bad'};

/** The colours of the current scheme, light or dark, and patterns in them. */
export class Palette {
  constructor(context) {
    this.context = context;
    this.read();
  }

  read() {
    this.style = getComputedStyle(document.documentElement);
    this.colours = new Map();
    this.patterns = new Map();
  }

  colour(name) {
    let colour = this.colours.get(name);
    if (!colour) this.colours.set(name, colour = this.style.getPropertyValue(name).trim());
    return colour;
  }

  /** Lines in one colour on another. */
  pattern(shape, ink, paper, line = 2) {
    const key = `${shape} ${ink} ${paper} ${line}`;
    let pattern = this.patterns.get(key);
    if (!pattern) {
      const tile = document.createElement('canvas');
      tile.width = tile.height = 8;
      const context = tile.getContext('2d');
      context.fillStyle = this.colour(paper);
      context.fillRect(0, 0, 8, 8);
      context.strokeStyle = this.colour(ink);
      context.lineWidth = line;
      for (const [x0, y0, x1, y1] of PATTERNS[shape]) {
        context.beginPath();
        context.moveTo(x0, y0);
        context.lineTo(x1, y1);
        context.stroke();
      }
      this.patterns.set(key, pattern = this.context.createPattern(tile, 'repeat'));
    }
    return pattern;
  }

  free() {
    return this.colour('--free');
  }

  stranded() {
    return this.pattern('rising', '--stranded', '--stranded-paper');
  }

  unhealthy() {
    return this.pattern('crossed', '--bad', '--bad-paper');
  }

  /** The thin pattern of a reason, fainter than the plain colour of GPUs with room; plain and pale where a pattern has no space. */
  reason(index, isSmall = false) {
    const [colour, shape] = REASONS[Math.min(index, REASONS.length - 1)];
    return isSmall ? `${this.colour(colour)}66` : this.pattern(shape, colour, '--reason-paper', shape === 'dots' ? 2 : 1);
  }
}

/** Paints GPUs as bars that are cut into the pods on them. */
export class PodPaint {
  constructor(palette) {
    this.palette = palette;
    // A namespace keeps its colour for as long as the page is open.
    this.namespaces = [];
  }

  /** Gives colours to namespaces that have none. */
  assignColours(namespaces) {
    for (const namespace of namespaces) if (!this.namespaces.includes(namespace)) this.namespaces.push(namespace);
  }

  colourOf(namespace) {
    const at = this.namespaces.indexOf(namespace);
    return this.palette.colour(at < 0 ? '--pod-a' : `--namespace-${Math.min(at + 1, NAMESPACES)}`);
  }

  legend() {
    const {palette, namespaces} = this;
    const isMany = namespaces.length > NAMESPACES;
    const own = namespaces.slice(0, isMany ? NAMESPACES - 1 : NAMESPACES);
    const entries = own.map((namespace) => [this.colourOf(namespace), `pods of ${namespace}`]);
    if (isMany) entries.push([palette.colour(`--namespace-${NAMESPACES}`), `pods of ${namespaces.length - own.length} other namespaces`]);
    if (!entries.length) entries.push([palette.colour('--pod-a'), 'pods, each cut at its limit']);
    return [
      ...entries,
      [palette.colour('--used'), 'memory in use, if known'],
      [palette.colour('--free'), 'free, a typical pod fits'],
      [palette.stranded(), 'stranded: free, but no typical pod fits'],
      [palette.unhealthy(), 'unhealthy, or its node takes no pods'],
    ];
  }

  /** `font` is the height of letters, 0 if there is no space for any. */
  gpu(context, node, gpu, box) {
    const {palette} = this;
    const {x, y, width, height, font} = box;
    const isOut = isUnusable(node, gpu);
    const scale = width / Math.max(gpu.memory.total, gpu.memory.allocated, 1);
    const taken = Math.round(gpu.memory.allocated * scale);
    const isSmall = height < 6;
    const rest = isOut ? 'unhealthy' : gpu.stranded ? 'stranded' : 'free';
    context.fillStyle = isSmall ? palette.colour(SMALL[rest]) : palette[rest]();
    context.fillRect(x, y, width, height);
    if (isSmall) {
      // A pattern has no space; a GPU that takes no pods is marked from end to end.
      context.fillStyle = palette.colour('--pod-a');
      if (!isOut) context.fillRect(x, y, taken, height);
      return;
    }
    this.pods(context, gpu, isOut ? {x, y, width, height: Math.round(height / 2), font: 0} : box, taken, scale);
    context.strokeStyle = palette.colour(isOut ? '--bad' : '--edge');
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    if (gpu.memory.allocated > gpu.memory.total) {
      context.fillStyle = palette.colour('--bad');
      context.fillRect(x + Math.round(gpu.memory.total * scale) - 1, y, 3, height);
    }
    if (font) this.label(context, gpu, isOut, isOut ? box : {...box, x: x + taken, width: width - taken});
  }

  pods(context, gpu, {x, y, height, font}, taken, scale) {
    // What no pod of the list holds: pods of other plugins, or pods whose devices are not known for sure.
    context.fillStyle = this.palette.colour('--other');
    if (taken > 0) context.fillRect(x, y, taken, height);
    let [left, held] = [0, 0];
    for (const holder of gpu.holders ?? []) {
      held += holder.memory;
      const right = Math.min(taken, Math.round(held * scale));
      this.pod(context, holder, {x: x + left, y, width: right - left, height, font}, scale);
      left = right;
    }
  }

  pod(context, holder, box, scale) {
    const {x, y, width, height, font} = box;
    if (width <= 0) return;
    const {palette} = this;
    context.fillStyle = holder.problem ? palette.pattern('dots', '--bad', '--pod-b') : this.colourOf(holder.namespace);
    context.fillRect(x, y, width, height);
    if (holder.used !== undefined && height >= 8) {
      const used = Math.min(width, Math.round(holder.used * scale));
      const part = Math.max(2, Math.round(height / 5));
      context.fillStyle = palette.colour('--used');
      context.fillRect(x, y + height - part, used, part);
      context.fillRect(x + used - 1, y + height - 2 * part, 1, part);
    }
    // The edge between two pods: where the limit of the left one is.
    if (width > 3) {
      context.fillStyle = palette.colour('--cut');
      context.fillRect(x + width - 1, y, 1, height);
    }
    if (font) write(context, podName(holder).split('/').at(-1), palette.colour('--on-pod'), box);
  }

  label(context, gpu, isOut, box) {
    const free = freeMemory(gpu);
    const amount = gpu.stranded ? `${memory(free)} stranded` : `${memory(free)} free`;
    let text = !gpu.healthy ? 'unhealthy' : gpu.closed ? 'closed' : isOut ? 'takes no pods' : free ? amount : '';
    // The colour says free or stranded, so that the amount alone will do; a part of it would mislead.
    if (text === amount && !fits(context, text, box)) text = memory(free);
    if (text.startsWith(memory(free)) && !fits(context, text, box)) text = '';
    if (text) write(context, text, this.palette.colour('--ink'), box, isOut || gpu.stranded ? this.palette.colour('--paper') : '');
  }
}

/** Paints GPUs in the colour of the reason for which a pod does not fit there; the pods on them show as cuts. */
export class VerdictPaint {
  constructor(palette, verdicts) {
    this.palette = palette;
    this.verdicts = verdicts;
  }

  legend() {
    const {palette, verdicts} = this;
    const entries = [];
    const {fits, byReason} = verdicts.counts();
    if (fits) entries.push([palette.colour('--fits'), `has room (${thousands(fits)})`]);
    for (const [reason, n] of byReason) entries.push([palette.reason(verdicts.indexOf(reason)), `${reason} (${thousands(n)})`]);
    const counted = new Set(byReason.map(([reason]) => reason));
    for (const {fits, reason} of verdicts.nodes.values()) {
      if (fits || counted.has(reason)) continue;
      counted.add(reason);
      entries.push([palette.reason(verdicts.indexOf(reason)), reason]);
    }
    return entries;
  }

  gpu(context, node, gpu, {x, y, width, height, font}) {
    const {palette, verdicts} = this;
    const verdict = verdicts.of(node, gpu);
    context.fillStyle = !verdict ? palette.colour('--other') : verdict.fits ? palette.colour('--fits') : palette.reason(verdicts.indexOf(verdict.reason), height < 6);
    context.fillRect(x, y, width, height);
    const scale = width / Math.max(gpu.memory.total, gpu.memory.allocated, 1);
    if (height >= 6) {
      const taken = Math.round(gpu.memory.allocated * scale);
      // Nothing dims a GPU that has room.
      context.fillStyle = palette.colour('--shade');
      if (!verdict?.fits) context.fillRect(x, y, taken, height);
      context.fillStyle = palette.colour('--cut');
      let at = 0;
      for (const holder of gpu.holders ?? []) {
        at += holder.memory;
        context.fillRect(x + Math.min(taken, Math.round(at * scale)) - 1, y, 1, height);
      }
      context.strokeStyle = palette.colour('--edge');
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    }
    if (font && verdict) {
      const text = verdict.fits ? 'has room' : verdict.lacks;
      write(context, text, palette.colour('--ink'), {x, y, width, height, font}, palette.colour('--paper'));
    }
  }
}

/** Measuring each text costs more than drawing it; letters of the font are about this wide. */
function lettersIn({width, font}) {
  return Math.floor((width - 8) / (font * 0.56));
}

/** Texts that may be too long by a few letters are measured. */
function fits(context, text, box) {
  const spare = lettersIn(box) - text.length;
  return spare >= 0 || spare >= -2 && context.measureText(text).width <= box.width - 8;
}

/** Writes as much of a text as fits into a box, on a plate if the box has a pattern; nothing if only a few letters fit. */
function write(context, text, colour, {x, y, width, height, font}, plate = '') {
  const most = lettersIn({width, font});
  if (most < Math.min(4, text.length)) return;
  const shown = !fits(context, text, {width, font}) ? `${text.slice(0, most - 1)}…` : text;
  if (plate) {
    context.fillStyle = plate;
    context.fillRect(x + 3, y + 2, Math.min(width - 6, shown.length * font * 0.56 + 6), height - 4);
  }
  context.fillStyle = colour;
  context.fillText(shown, x + 5, y + height / 2);
}

/** A square that shows a colour or pattern, for legends. */
export function swatch(fill) {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 16;
  canvas.setAttribute('aria-hidden', 'true');
  const context = canvas.getContext('2d');
  context.fillStyle = fill;
  context.fillRect(0, 0, 16, 16);
  return canvas;
}
