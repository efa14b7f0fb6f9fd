// The card map: nodes in a grid, each GPU a bar. Only what is in the window is drawn, and of that only what has changed.

import {hardware} from './cluster.js';
import {measure} from './format.js';

/** Heights of a bar in pixels, from thousands of nodes in one window to bars with names of pods in them. */
const HEIGHTS = [2, 3, 4, 5, 6, 8, 10, 13, 17, 22, 28];
const FONT = 'system-ui, sans-serif';

export class CardMap {
  /**
   * `onSelect` gets the node and the minor number of the GPU that is selected, or null; `onWindow` the places of the first and last
   * node in the window, from 1, after each drawing.
   */
  constructor({host, space, canvas}, onSelect, onWindow) {
    Object.assign(this, {host, space, canvas, onSelect, onWindow});
    this.context = canvas.getContext('2d', {alpha: false});
    this.nodes = [];
    this.places = new Map();
    this.paint = null;
    this.zoom = null;
    this.selected = null;
    this.hovered = null;
    this.changed = new Set();
    this.isWhole = true;
    this.frame = 0;
    host.addEventListener('scroll', () => this.schedule(), {passive: true});
    host.addEventListener('pointermove', (event) => this.hover(event));
    host.addEventListener('pointerleave', () => this.hover(null));
    host.addEventListener('click', (event) => this.select(this.hit(event)));
    host.addEventListener('keydown', (event) => this.key(event));
    new ResizeObserver(() => this.layout()).observe(host);
  }

  /** Shows these nodes, painted so. */
  show(nodes, paint) {
    this.nodes = nodes;
    this.paint = paint;
    this.places = new Map(nodes.map((node, place) => [node.name, place]));
    if (this.selected && !this.places.has(this.selected.node)) this.select(null);
    this.layout();
  }

  /** Draws nodes again whose content has changed; the same nodes stay in the same places. */
  update(nodes) {
    for (const node of nodes) {
      const place = this.places.get(node.name);
      if (place === undefined) continue;
      // Another number of GPUs moves the rows below.
      if (this.nodes[place].gpus.length !== node.gpus.length) this.isWhole = true;
      this.nodes[place] = node;
      this.changed.add(place);
    }
    if (this.isWhole) this.layout();
    else this.schedule();
  }

  /** Makes bars larger or smaller by steps; `null` fits all nodes into the window. */
  zoomBy(steps) {
    this.zoom = steps === null ? null : Math.max(0, Math.min(HEIGHTS.length - 1, this.step + steps));
    const middle = this.placeAt(this.host.scrollTop + this.host.clientHeight / 2);
    this.layout();
    this.reveal(this.selected ? this.places.get(this.selected.node) : middle, true);
  }

  layout() {
    const {clientWidth, clientHeight} = this.host;
    if (!clientWidth || !this.paint) return;
    this.width = clientWidth;
    this.height = clientHeight;
    const fitting = HEIGHTS.findLastIndex((_, step) => this.measure(step) <= clientHeight);
    // Nothing to fit everything in: bars of 4 pixels still show pods.
    this.step = this.zoom ?? Math.max(fitting, HEIGHTS.indexOf(this.nodes.length > 2000 ? 2 : 4));
    this.contentHeight = this.measure(this.step);
    this.space.style.height = `${Math.max(this.contentHeight, clientHeight)}px`;
    const ratio = window.devicePixelRatio || 1;
    this.ratio = ratio;
    this.canvas.width = Math.round(clientWidth * ratio);
    this.canvas.height = Math.round(clientHeight * ratio);
    this.canvas.style.width = `${clientWidth}px`;
    this.canvas.style.height = `${clientHeight}px`;
    this.isWhole = true;
    this.schedule();
  }

  /** Places everything for bars of one height; returns the height of all rows. */
  measure(step) {
    const bar = HEIGHTS[step];
    const gap = bar < 6 ? 1 : Math.round(bar / 4);
    const padding = bar < 4 ? 4 : Math.round(bar * 0.6) + 4;
    const name = bar >= 6 ? Math.min(14, bar + 3) + 6 : 0;
    const columns = Math.max(1, Math.min(this.nodes.length, Math.floor((this.width - padding) / (bar * 11 + padding))));
    // Bars take the width that is there, up to twice as wide as they have to be.
    const width = Math.min(bar * 30, Math.floor((this.width - padding) / columns) - padding);
    const tops = [padding];
    for (let first = 0; first < this.nodes.length; first += columns) {
      let most = 1;
      for (let at = first; at < Math.min(first + columns, this.nodes.length); at += 1) {
        most = Math.max(most, this.nodes[at].gpus.length);
      }
      tops.push(tops.at(-1) + name + most * (bar + gap) + padding);
    }
    Object.assign(this, {bar, gap, padding, name, columns, barWidth: width, tops});
    return tops.at(-1);
  }

  schedule() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    if (!this.paint || !this.width) return;
    const began = performance.now();
    const {context, ratio, height} = this;
    const top = Math.round(this.host.scrollTop * ratio) / ratio;
    const moved = top - (this.drawnTop ?? top);
    if (this.isWhole || Math.abs(moved) >= height) {
      this.drawRange(top, 0, height);
    } else {
      if (moved) {
        // Most of the picture is there already, a little higher or lower.
        context.setTransform(1, 0, 0, 1, 0, 0);
        context.drawImage(this.canvas, 0, Math.round(-moved * ratio));
        if (moved > 0) this.drawRange(top, height - moved, height);
        else this.drawRange(top, 0, -moved);
      }
      for (const place of this.changed) this.drawPlace(top, place);
    }
    this.changed.clear();
    this.isWhole = false;
    this.drawnTop = top;
    const end = (this.rowAt(top + height - 1) + 1) * this.columns;
    this.onWindow(this.rowAt(top + this.padding) * this.columns + 1, Math.min(end, this.nodes.length), this.nodes.length);
    measure('map', began);
  }

  /** Draws a horizontal part of the window, between two heights in it. */
  drawRange(top, from, to) {
    const {context, ratio} = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.save();
    context.beginPath();
    context.rect(0, from, this.width, to - from);
    context.clip();
    context.fillStyle = this.paint.palette.colour('--paper');
    context.fillRect(0, from, this.width, to - from);
    const last = this.tops.length - 1;
    for (let row = this.rowAt(top + from); row < last && this.tops[row] < top + to; row += 1) {
      for (let column = 0; column < this.columns; column += 1) {
        const place = row * this.columns + column;
        if (place < this.nodes.length) this.drawNode(place, top);
      }
    }
    context.restore();
  }

  drawPlace(top, place) {
    const {x, y, height} = this.box(place, top);
    if (y + height < 0 || y > this.height) return;
    const {context, ratio, padding} = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = this.paint.palette.colour('--paper');
    const margin = padding / 2;
    context.fillRect(x - margin, y - margin, this.barWidth + padding, height + padding);
    this.drawNode(place, top);
  }

  box(place, top) {
    const row = Math.floor(place / this.columns);
    const {gpus} = this.nodes[place];
    return {
      x: this.padding + (place % this.columns) * (this.barWidth + this.padding),
      y: this.tops[row] - top,
      height: this.name + Math.max(1, gpus.length) * (this.bar + this.gap) - this.gap,
    };
  }

  drawNode(place, top) {
    const {context, bar, gap, name, barWidth, paint} = this;
    const {palette} = paint;
    const node = this.nodes[place];
    const {x, y, height} = this.box(place, top);
    const isTrouble = node.plugin || node.problems?.length;
    context.textBaseline = 'middle';
    if (name) {
      const size = name - 6;
      context.font = `${isTrouble ? 'bold ' : ''}${size}px ${FONT}`;
      context.fillStyle = palette.colour(isTrouble ? '--bad' : '--ink');
      const most = Math.floor(barWidth / (size * 0.56));
      const text = isTrouble ? `! ${node.name}` : node.name;
      context.fillText(text.length > most ? `${text.slice(0, most - 1)}…` : text, x, y + size / 2 + 1);
      // Bars of all GPUs are equally long: the size of a GPU is in the text behind the name.
      const end = x + context.measureText(`${text}  `).width;
      context.font = `${size}px ${FONT}`;
      context.fillStyle = palette.colour('--quiet');
      context.fillText(hardware(node, most - text.length - 2), end, y + size / 2 + 1);
    }
    const font = bar >= 12 ? Math.min(13, bar - 4) : 0;
    if (font) context.font = `${font}px ${FONT}`;
    node.gpus.forEach((gpu, at) => {
      paint.gpu(context, node, gpu, {x, y: y + name + at * (bar + gap), width: barWidth, height: bar, font});
    });
    if (!node.gpus.length) {
      context.fillStyle = palette.unhealthy();
      context.fillRect(x, y + name, barWidth, bar);
    }
    if (isTrouble && !name) {
      context.strokeStyle = palette.colour('--bad');
      context.lineWidth = 1;
      context.strokeRect(x - 1.5, y - 1.5, barWidth + 3, height + 3);
    }
    for (const [mark, colour] of [[this.hovered, '--edge'], [this.selected, '--focus']]) {
      if (mark?.node !== node.name) continue;
      const at = node.gpus.findIndex((gpu) => gpu.minor === mark.minor);
      context.strokeStyle = palette.colour(colour);
      context.lineWidth = 2;
      context.strokeRect(x - 1, y + name + Math.max(0, at) * (bar + gap) - 1, barWidth + 2, bar + 2);
    }
  }

  rowAt(y) {
    let [low, high] = [0, this.tops.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tops[middle] <= y) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  placeAt(y) {
    return Math.min(this.nodes.length - 1, this.rowAt(y) * this.columns);
  }

  /** The GPU under a pointer. */
  hit(event) {
    const {left, top} = this.host.getBoundingClientRect();
    const y = event.clientY - top + this.host.scrollTop;
    const column = Math.floor((event.clientX - left - this.padding / 2) / (this.barWidth + this.padding));
    const place = this.rowAt(y) * this.columns + column;
    const node = this.nodes[place];
    if (!node || column < 0 || column >= this.columns) return null;
    const at = Math.floor((y - this.box(place, 0).y - this.name) / (this.bar + this.gap));
    if (at >= Math.max(1, node.gpus.length)) return null;
    return {node: node.name, minor: node.gpus[Math.max(0, at)]?.minor};
  }

  hover(event) {
    const found = event && this.paint && this.width ? this.hit(event) : null;
    if (found?.node === this.hovered?.node && found?.minor === this.hovered?.minor) return;
    this.mark('hovered', found);
    if (!this.selected) this.onSelect(found);
  }

  select(found) {
    this.mark('selected', found);
    this.onSelect(found);
  }

  mark(kind, found) {
    for (const one of [this[kind], found]) if (one && this.places.has(one.node)) this.changed.add(this.places.get(one.node));
    this[kind] = found;
    this.schedule();
  }

  /** Selects a GPU and scrolls to it. */
  goTo(node, minor) {
    const place = this.places.get(node);
    if (place === undefined) return;
    this.select({node, minor});
    this.reveal(place);
  }

  reveal(place, isCentred = false) {
    if (place === undefined || place < 0 || !this.nodes.length) return;
    const {y, height} = this.box(place, 0);
    const {scrollTop, clientHeight} = this.host;
    if (isCentred || y < scrollTop || y + height > scrollTop + clientHeight) {
      this.host.scrollTop = y - (clientHeight - height) / 2;
    }
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.nodes.length) return;
    if (event.key === '+' || event.key === '=') this.zoomBy(1);
    else if (event.key === '-') this.zoomBy(-1);
    else if (event.key === '0') this.zoomBy(null);
    else if (event.key === 'Escape') this.select(null);
    else if (!this.move(event.key)) return;
    event.preventDefault();
  }

  /** Moves the selection; false for other keys. */
  move(key) {
    const start = this.selected ? this.places.get(this.selected.node) : this.placeAt(this.host.scrollTop + this.padding);
    const rows = Math.max(1, Math.floor(this.height / (this.tops[1] - this.tops[0])));
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, PageUp: -rows * this.columns, PageDown: rows * this.columns,
      Home: -this.nodes.length, End: this.nodes.length, ArrowUp: 0, ArrowDown: 0,
    };
    if (!(key in steps)) return false;
    const gpus = this.nodes[start].gpus;
    let at = this.selected ? gpus.findIndex((gpu) => gpu.minor === this.selected.minor) : -1;
    let place = start;
    if (this.selected) place += steps[key];
    if (key === 'ArrowDown' && (at += 1) >= gpus.length) [place, at] = [start + this.columns, 0];
    if (key === 'ArrowUp' && (at -= 1) < 0) [place, at] = [start - this.columns, Infinity];
    place = Math.max(0, Math.min(this.nodes.length - 1, place));
    const reached = this.nodes[place].gpus;
    const gpu = reached[Math.max(0, Math.min(reached.length - 1, at))];
    this.goTo(this.nodes[place].name, gpu?.minor);
    return true;
  }
}
