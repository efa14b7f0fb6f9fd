// A table of any length: only the rows in the window exist. Assistive technology learns the number of all rows.

import {element} from './format.js';

/** Height of a row in pixels, as in page.css. */
const ROW = 28;
/** Rows beyond the window at each end, so that scrolling by a few rows shows no gap. */
const MARGIN = 6;
/** Up to so many rows all exist, each as high as its text. */
const WHOLE = 300;

const byText = new Intl.Collator('en', {numeric: true}).compare;

export class Table {
  /**
   * `columns` are pairs of a heading and a function from a row to a text or an element; a third member names a class, and a fourth
   * is a function from a row to what the column is sorted by, if that is not its text. `onPick` gets the row that is clicked or
   * reached with the arrow keys. `sort` is the heading of the column to sort by, after "-" if the last comes first; `onSort` gets
   * it when it changes.
   */
  constructor(host, label, columns, onPick = null, sort = '', onSort = null) {
    Object.assign(this, {columns, onPick, sort, onSort, rows: [], order: null, picked: null, first: -1});
    this.scroller = element('div', 'scroller');
    this.scroller.tabIndex = 0;
    this.scroller.setAttribute('role', 'region');
    this.scroller.setAttribute('aria-label', label);
    this.table = element('table', onPick ? 'pickable' : '');
    const head = element('tr');
    this.heads = columns.map(([heading, , kind]) => {
      const button = element('button', '', heading);
      button.type = 'button';
      button.addEventListener('click', () => this.sortBy(heading, kind?.includes('number')));
      const cell = element('th', kind ?? '', button);
      cell.scope = 'col';
      return cell;
    });
    head.append(...this.heads);
    this.markSorted();
    head.setAttribute('aria-rowindex', '1');
    this.body = element('tbody');
    this.caption = element('caption', 'quiet', label);
    this.table.append(this.caption, element('thead', '', head), this.body);
    this.scroller.append(this.table);
    host.replaceChildren(this.scroller);
    this.scroller.addEventListener('scroll', () => this.schedule(), {passive: true});
    if (onPick) {
      this.body.addEventListener('click', (event) => this.pick(Number(event.target.closest('tr')?.dataset.at)));
      this.scroller.addEventListener('keydown', (event) => this.key(event));
    }
    new ResizeObserver(() => this.schedule()).observe(this.scroller);
  }

  /** `rows` is an array, or has `length` and `at` like one; `isPicked` says of a row that it is the selected one. */
  show(rows, isPicked = () => false) {
    this.rows = rows;
    this.isPicked = isPicked;
    this.order = this.sorted();
    this.table.classList.toggle('whole', rows.length <= WHOLE);
    this.table.setAttribute('aria-rowcount', String(rows.length + 1));
    this.first = -1;
    this.schedule();
  }

  /** Sorts by a column: first upwards, for numbers downwards, then the other way, then as the rows came. */
  sortBy(heading, isNumber) {
    const ways = isNumber ? [`-${heading}`, heading] : [heading, `-${heading}`];
    this.sort = ways[ways.indexOf(this.sort) + 1] ?? '';
    this.markSorted();
    this.show(this.rows, this.isPicked);
    this.onSort?.(this.sort);
  }

  markSorted() {
    this.columns.forEach(([heading], at) => {
      const way = this.sort === heading ? 'ascending' : this.sort === `-${heading}` ? 'descending' : 'none';
      this.heads[at].setAttribute('aria-sort', way);
    });
  }

  /** The numbers of the rows in the order of a column; null for the order in which they came. */
  sorted() {
    const column = this.columns.find(([heading]) => this.sort === heading || this.sort === `-${heading}`);
    if (!column) return null;
    const [, show, , value = (row) => show(row).textContent ?? show(row)] = column;
    const values = Array.from({length: this.rows.length}, (_, at) => value(this.rows.at(at)) ?? '');
    const way = this.sort.startsWith('-') ? -1 : 1;
    const compare = (a, b) => typeof a === 'number' && typeof b === 'number' ? a - b : byText(String(a), String(b));
    return [...values.keys()].sort((a, b) => way * compare(values[a], values[b]) || a - b);
  }

  /** The row at a place of the table. */
  at(place) {
    return this.rows.at(this.order ? this.order[place] : place);
  }

  schedule() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    const {scrollTop, clientHeight} = this.scroller;
    const isWhole = this.rows.length <= WHOLE;
    const first = isWhole ? 0 : Math.max(0, Math.floor(scrollTop / ROW) - MARGIN);
    const last = isWhole ? this.rows.length : Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / ROW) + MARGIN);
    if (first === this.first && last === this.last) return;
    Object.assign(this, {first, last});
    const shown = [spacer(first, this.columns.length)];
    for (let at = first; at < last; at += 1) shown.push(this.row(at));
    shown.push(spacer(this.rows.length - last, this.columns.length));
    this.body.replaceChildren(...shown);
  }

  row(at) {
    const row = this.at(at);
    const line = element('tr');
    line.setAttribute('aria-rowindex', String(at + 2));
    line.dataset.at = at;
    if (this.isPicked(row)) {
      line.className = 'picked';
      this.picked = at;
    }
    for (const [, show, kind] of this.columns) {
      const content = show(row);
      const cell = element('td', kind ?? '', content);
      // A narrow column cuts long texts off.
      if (kind !== 'picture' && cell.textContent.length > 16) cell.title = cell.textContent;
      line.append(cell);
    }
    return line;
  }

  pick(at) {
    if (!(at < this.rows.length)) return;
    this.picked = at;
    this.onPick(this.at(at));
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW) - 1);
    const steps = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity};
    if (!(event.key in steps) || !this.rows.length) return;
    const from = this.picked ?? -1;
    const at = Math.max(0, Math.min(this.rows.length - 1, from + steps[event.key]));
    this.pick(at);
    this.revealPlace(at);
    event.preventDefault();
  }

  /** Scrolls to a row of `rows`. */
  reveal(row) {
    this.revealPlace(this.order ? this.order.indexOf(row) : row);
  }

  revealPlace(place) {
    const {scrollTop, clientHeight} = this.scroller;
    const line = this.rows.length <= WHOLE ? this.body.querySelector(`tr[data-at="${place}"]`) : null;
    const [y, height] = line ? [line.offsetTop - ROW, line.offsetHeight] : [place * ROW, ROW];
    if (y < scrollTop) this.scroller.scrollTop = y;
    else if (y + height + ROW > scrollTop + clientHeight) this.scroller.scrollTop = y - clientHeight + height + ROW;
  }
}

/** The GPUs of nodes as rows. Nodes may be replaced in the list, as long as their numbers of GPUs stay. */
export class GpuRows {
  constructor(nodes) {
    this.nodes = nodes;
    // The row at which each node begins. A node without GPUs has a row too.
    this.starts = [];
    this.length = 0;
    for (const node of nodes) {
      this.starts.push(this.length);
      this.length += Math.max(1, node.gpus.length);
    }
  }

  at(row) {
    let [low, high] = [0, this.starts.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= row) low = middle;
      else high = middle - 1;
    }
    const node = this.nodes[low];
    return {node, gpu: node.gpus[row - this.starts[low]]};
  }

  /** The row of a GPU of the node at a place of the list. */
  find(place, minor) {
    return this.starts[place] + Math.max(0, this.nodes[place].gpus.findIndex((gpu) => gpu.minor === minor));
  }
}

/** Keeps the place of rows that do not exist. */
function spacer(rows, columns) {
  const line = element('tr', 'spacer');
  line.setAttribute('aria-hidden', 'true');
  const cell = element('td');
  cell.colSpan = columns;
  cell.style.height = `${rows * ROW}px`;
  line.append(cell);
  return line;
}
