// The history: allocated, stranded and free memory of 24 hours as areas, pods that waited below.

import {memory, minute, count, percent} from './format.js';

const DAY = 24 * 60;
/** Pixels for the axes, and for pods that waited. */
const [LEFT, BOTTOM, PENDING] = [74, 24, 56];

/** The sums of one model, or of all, at each minute from the first on at which there were GPUs. */
export function sums(history, model) {
  const points = history.points.map(({time, pending, models}) => {
    const point = {time: time * 1000, pending, total: 0, allocated: 0, stranded: 0, unusable: 0, free: 0, used: undefined};
    for (const [name, totals] of Object.entries(models)) {
      if (model && name !== model) continue;
      point.total += totals.memory.total;
      point.allocated += totals.memory.allocated;
      point.stranded += totals.stranded;
      point.unusable += totals.unusable;
      if (totals.used !== undefined) point.used = (point.used ?? 0) + totals.used;
    }
    point.free = Math.max(0, point.total - point.allocated - point.unusable);
    return point;
  });
  const first = points.findIndex((point) => point.total);
  return first < 0 ? [] : points.slice(first);
}

/** A point in words, for the details and the table. */
export function describe(point) {
  const used = point.used === undefined ? '' : `, ${memory(point.used)} in use`;
  return `${minute(point.time)}: ${memory(point.allocated)} of ${memory(point.total)} allocated (${percent(point.allocated, point.total)})${used}, `
    + `${memory(point.stranded)} of ${memory(point.free)} free is stranded, ${memory(point.unusable)} on GPUs that take no pods, `
    + `${count(point.pending, 'pod')} waiting`;
}

export class HistoryChart {
  constructor({host, canvas}, palette, onSelect) {
    Object.assign(this, {host, canvas, palette, onSelect, points: [], selected: null});
    this.context = canvas.getContext('2d');
    new ResizeObserver(() => this.draw()).observe(host);
    host.addEventListener('pointermove', (event) => this.selectAt(event.clientX - host.getBoundingClientRect().left));
    host.addEventListener('keydown', (event) => this.key(event));
  }

  show(points) {
    const time = this.points[this.selected]?.time;
    this.points = points;
    const same = points.findIndex((point) => point.time === time);
    this.selected = same < 0 ? null : same;
    this.draw();
  }

  legend() {
    const {palette} = this;
    return [
      [palette.colour('--pod-a'), 'allocated'],
      [palette.colour('--used'), 'in use, if known'],
      [palette.stranded(), 'stranded: free, but no typical pod fits'],
      [palette.unhealthy(), 'unhealthy, or its node takes no pods'],
      [palette.colour('--free'), 'free, a typical pod fits'],
      [palette.pattern('level', '--ink', '--free'), 'pods that wait'],
    ];
  }

  draw() {
    const {clientWidth: width, clientHeight: height} = this.host;
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    const {canvas, context, palette, points} = this;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    if (!points.length) return;
    // It begins where the data does: an empty part looks like zeros.
    const end = points.at(-1).time;
    const start = Math.min(points[0].time, end - 60_000);
    this.x = (time) => LEFT + (width - LEFT - 8) * (time - start) / (end - start);
    const areaHeight = height - BOTTOM - PENDING - 20;
    const most = Math.max(...points.map((point) => Math.max(point.total, point.allocated)), 1);
    const y = (bytes) => 8 + areaHeight * (1 - bytes / most);
    this.area(y, (point) => point.total, palette.colour('--free'));
    this.area(y, (point) => point.allocated + point.stranded + point.unusable, palette.unhealthy());
    this.area(y, (point) => point.allocated + point.stranded, palette.stranded());
    this.area(y, (point) => point.allocated, palette.colour('--pod-a'));
    this.line(points.filter((point) => point.used !== undefined), (point) => y(point.used));
    const waited = Math.max(...points.map((point) => point.pending), 1);
    const base = height - BOTTOM;
    this.area((pods) => base - (PENDING - 8) * pods / waited, (point) => point.pending, palette.pattern('level', '--ink', '--free'), base);
    this.axes({width, height, base, most, y, waited, start, end});
    const point = points[this.selected];
    if (point) {
      context.fillStyle = palette.colour('--focus');
      context.fillRect(Math.round(this.x(point.time)) - 1, 4, 2, base - 4);
    }
  }

  /** Fills the area below a value, in steps: a point counts until the next. */
  area(y, value, fill, base = y(0)) {
    const {context, points, x} = this;
    context.beginPath();
    context.moveTo(x(points[0].time), base);
    points.forEach((point, at) => {
      context.lineTo(x(point.time), y(value(point)));
      context.lineTo(x((points[at + 1] ?? point).time), y(value(point)));
    });
    context.lineTo(Math.max(x(points.at(-1).time), x(points[0].time) + 2), y(value(points.at(-1))));
    context.lineTo(Math.max(x(points.at(-1).time), x(points[0].time) + 2), base);
    context.closePath();
    context.fillStyle = fill;
    context.fill();
  }

  line(points, y) {
    const {context, x, palette} = this;
    context.beginPath();
    for (const point of points) context.lineTo(x(point.time), y(point));
    context.strokeStyle = palette.colour('--used');
    context.lineWidth = 2;
    context.stroke();
  }

  axes({width, base, most, y, waited, start, end}) {
    const {context, palette} = this;
    context.font = '12px system-ui, sans-serif';
    context.fillStyle = palette.colour('--ink');
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    for (const part of [0, 0.5, 1]) context.fillText(memory(most * part), LEFT - 8, y(most * part) + (part ? 0 : -4));
    context.fillText(count(waited, 'pod'), LEFT - 8, base - PENDING + 14);
    context.textAlign = 'center';
    context.textBaseline = 'top';
    const most_labels = Math.max(1, Math.floor((width - LEFT) / 90));
    const steps = [1, 2, 5, 10, 30, 60, 120, 180, 360, DAY / 2].map((minutes) => minutes * 60_000);
    const step = steps.find((step) => (end - start) / step <= most_labels) ?? steps.at(-1);
    const offset = new Date(end).getTimezoneOffset() * 60_000;
    for (let time = Math.ceil((start - offset) / step) * step + offset; time <= end; time += step) {
      const at = this.x(time);
      if (at > width - 24) continue;
      context.fillRect(Math.round(at), base, 1, 5);
      context.fillText(minute(time).slice(0, 5), at, base + 7);
    }
  }

  selectAt(x) {
    if (!this.points.length || !this.x) return;
    let nearest = 0;
    this.points.forEach((point, at) => {
      if (Math.abs(this.x(point.time) - x) < Math.abs(this.x(this.points[nearest].time) - x)) nearest = at;
    });
    this.select(nearest);
  }

  selectTime(time) {
    this.select(this.points.findIndex((point) => point.time === time));
  }

  select(at) {
    this.selected = Math.max(0, Math.min(this.points.length - 1, at));
    this.draw();
    this.onSelect(this.points[this.selected]);
  }

  key(event) {
    const steps = {ArrowLeft: -1, ArrowRight: 1, PageUp: -60, PageDown: 60, Home: -DAY, End: DAY};
    if (!(event.key in steps) || !this.points.length) return;
    this.select((this.selected ?? this.points.length - 1) + steps[event.key]);
    event.preventDefault();
  }
}
