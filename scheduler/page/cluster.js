// The state of the cluster as the read API gives it: the whole first, then changes.

import {memory} from './format.js';

const byName = new Intl.Collator('en', {numeric: true}).compare;

export class Cluster {
  constructor() {
    this.nodes = new Map();
    this.models = {};
    this.pending = [];
    this.pendingTotal = 0;
    this.totals = null;
    this.replica = null;
    this.namesHidden = false;
    // Memory in use by node, as it was known last: events do not carry it.
    this.use = new Map();
    this.useUnknown = {};
    // Node names in order; worked out again only when nodes come or go.
    this.order = null;
    // What is worked out once for each state of a node, and goes with it.
    this.texts = new WeakMap();
    this.tallies = new WeakMap();
  }

  replace(state) {
    this.nodes = new Map(state.nodes.map((node) => [node.name, this.withUse(node)]));
    this.order = null;
    this.pending = state.pending;
    this.replica = state.replica;
    this.namesHidden = Boolean(state.namesHidden);
    this.sum(state);
  }

  /** Takes the memory in use from a state that has it. The nodes themselves may have changed since. */
  takeUse(state) {
    this.use = new Map();
    this.useUnknown = state.useUnknown ?? {};
    for (const {name, gpus} of state.nodes) {
      const known = new Map();
      for (const gpu of gpus) {
        if (gpu.used === undefined) continue;
        known.set(gpu.minor, {used: gpu.used, pods: new Map((gpu.holders ?? []).map(({uid, used, overShare}) => [uid, {used, overShare}]))});
      }
      if (known.size) this.use.set(name, known);
    }
    for (const node of this.nodes.values()) this.withUse(node);
  }

  withUse(node) {
    const known = this.use.get(node.name);
    for (const gpu of known ? node.gpus : []) {
      const ofGpu = known.get(gpu.minor);
      if (!ofGpu) continue;
      gpu.used = ofGpu.used;
      for (const holder of gpu.holders ?? []) Object.assign(holder, ofGpu.pods.get(holder.uid) ?? {used: undefined, overShare: undefined});
    }
    return node;
  }

  /**
   * Applies the events of one revision. Returns the changed nodes, or null if `choose` for this view gives other nodes than
   * before, or another order.
   */
  apply(events, view) {
    const changed = [];
    let [isSameSet, isSameView] = [true, true];
    for (const {name, data} of events) {
      if (name === 'node') {
        const before = this.nodes.get(data.name);
        isSameSet &&= Boolean(before);
        isSameView &&= Boolean(before) && this.isSamePlace(before, data, view);
        this.nodes.set(data.name, this.withUse(data));
        changed.push(data);
      } else if (name === 'removed') {
        if (this.nodes.delete(data.name)) isSameSet = false;
      } else if (name === 'pending') {
        this.pending = data;
      } else if (name === 'totals') {
        this.sum(data);
      }
    }
    if (!isSameSet) this.order = null;
    return isSameSet && isSameView ? changed : null;
  }

  isSamePlace(before, after, {search, show, order, namespace}) {
    const isShown = SHOWN[show] ?? SHOWN.all;
    const amount = AMOUNTS[order];
    const has = (node) => !namespace || namespacesOf(node).has(namespace);
    return isShown(before) === isShown(after) && has(before) === has(after) && (!search || this.text(before) === this.text(after))
      && (!amount || amount(before) === amount(after));
  }

  sum({totals, models, pendingTotal}) {
    this.totals = totals;
    this.models = models;
    this.pendingTotal = pendingTotal;
  }

  sorted() {
    this.order ??= [...this.nodes.keys()].sort(byName);
    return this.order;
  }

  /** The namespaces of all pods with a share of a GPU, and of those that wait. */
  namespaces() {
    const found = new Set(this.pending.map((pod) => pod.namespace));
    for (const node of this.nodes.values()) for (const namespace of namespacesOf(node)) found.add(namespace);
    found.delete(undefined);
    return [...found].sort(byName);
  }

  /** The nodes to show: those with pods of a namespace that match every word of `search` and `show`, in an order. */
  choose({search, show, order, namespace}) {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const isShown = SHOWN[show] ?? SHOWN.all;
    const nodes = [];
    for (const name of this.sorted()) {
      const node = this.nodes.get(name);
      if (namespace && !namespacesOf(node).has(namespace)) continue;
      if (isShown(node) && words.every((word) => this.text(node).includes(word))) nodes.push(node);
    }
    const amount = AMOUNTS[order];
    if (!amount) return nodes;
    // Each amount is worked out once, not in each comparison.
    const amounts = new Map(nodes.map((node) => [node, amount(node)]));
    return nodes.sort((a, b) => amounts.get(b) - amounts.get(a));
  }

  /** Sums of what is wrong, over all nodes. */
  troubles() {
    const sums = {away: 0, reports: 0, records: 0};
    for (const node of this.nodes.values()) {
      let tally = this.tallies.get(node);
      if (!tally) {
        const records = node.gpus.filter((gpu) => gpu.healthy && gpuTroubles(gpu).length).length;
        this.tallies.set(node, tally = {away: node.plugin ? 1 : 0, reports: node.problems?.length ? 1 : 0, records});
      }
      for (const kind in sums) sums[kind] += tally[kind];
    }
    return sums;
  }

  text(node) {
    let text = this.texts.get(node);
    if (text === undefined) {
      const parts = [node.name, node.model ?? ''];
      for (const holder of holdersOf(node)) parts.push(`${holder.namespace ?? ''}/${holder.name ?? holder.uid}`);
      text = parts.join(' ').toLowerCase();
      this.texts.set(node, text);
    }
    return text;
  }

  /** The pods with a share of a GPU, each with the sums over its GPUs. `used` is undefined if it is not known everywhere. */
  pods(search, inNamespace) {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const pods = new Map();
    for (const name of this.sorted()) {
      const node = this.nodes.get(name);
      for (const gpu of node.gpus) {
        for (const holder of gpu.holders ?? []) {
          let pod = pods.get(holder.uid);
          if (!pod) {
            const {uid, namespace, name, asked} = holder;
            pod = {uid, namespace, name, asked, node: node.name, gpus: [], memory: 0, core: 0, used: 0};
            pods.set(uid, pod);
          }
          pod.gpus.push(gpu.minor);
          pod.memory += holder.memory;
          pod.core += holder.core ?? 0;
          pod.used += holder.used ?? NaN;
          pod.overShare ||= holder.overShare;
        }
      }
    }
    const chosen = [];
    for (const pod of pods.values()) {
      if (Number.isNaN(pod.used)) pod.used = undefined;
      const text = `${pod.namespace}/${pod.name} ${pod.node}`.toLowerCase();
      if (inNamespace && pod.namespace !== inNamespace) continue;
      if (words.every((word) => text.includes(word))) chosen.push(pod);
    }
    const idle = (pod) => pod.used === undefined ? -1 : pod.memory - pod.used;
    return chosen.sort((a, b) => idle(b) - idle(a) || b.memory - a.memory);
  }
}

function* holdersOf(node) {
  for (const gpu of node.gpus) yield* gpu.holders ?? [];
}

/** The namespaces of a node's pods. A state of a node is never changed, except for the memory in use. */
const namespaces = new WeakMap();
function namespacesOf(node) {
  let found = namespaces.get(node);
  if (!found) {
    found = new Set();
    for (const holder of holdersOf(node)) found.add(holder.namespace);
    namespaces.set(node, found);
  }
  return found;
}

export function freeMemory(gpu) {
  return Math.max(0, gpu.memory.total - gpu.memory.allocated);
}

/** No new pod gets this GPU, however much of its memory is free. */
export function isUnusable(node, gpu) {
  return !gpu.healthy || Boolean(gpu.closed) || Boolean(node.plugin);
}

/** Free memory of a GPU on which a typical pod fits. */
function usableMemory(node, gpu) {
  return isUnusable(node, gpu) || gpu.stranded ? 0 : freeMemory(gpu);
}

/** The GPUs of a node in at most so many letters, such as "NVIDIA-A10, 4 × 24 GiB", "4 × 24 GiB" or "24 GiB". */
export function hardware({model, gpus}, letters) {
  if (!gpus.length) return '';
  const sizes = gpus.map((gpu) => gpu.memory.total);
  const [least, most] = [Math.min(...sizes), Math.max(...sizes)].map(memory);
  const size = least === most ? most : `${least.replace(most.slice(most.indexOf(' ')), '')} to ${most}`;
  const texts = [`${model}, ${gpus.length} × ${size}`, `${gpus.length} × ${size}`, size];
  return texts.slice(model ? 0 : 1).find((text) => text.length <= letters) ?? '';
}

const SHOWN = {
  all: () => true,
  trouble: (node) => nodeTroubles(node).length > 0 || node.gpus.some((gpu) => gpuTroubles(gpu).length > 0),
  stranded: (node) => node.gpus.some((gpu) => gpu.stranded > 0),
  free: (node) => node.gpus.some((gpu) => usableMemory(node, gpu) > 0),
};

const AMOUNTS = {
  trouble: (node) => nodeTroubles(node).length ? 2 : node.gpus.some((gpu) => gpuTroubles(gpu).length) ? 1 : 0,
  free: (node) => node.gpus.reduce((sum, gpu) => sum + usableMemory(node, gpu), 0),
  stranded: (node) => node.gpus.reduce((sum, gpu) => sum + (gpu.stranded ?? 0), 0),
};

/** Sentences about a node that needs somebody's attention. */
export function nodeTroubles(node) {
  return node.plugin ? [node.plugin, ...node.problems ?? []] : node.problems ?? [];
}

export function gpuTroubles(gpu) {
  const troubles = [];
  if (!gpu.healthy) troubles.push('unhealthy, takes no new pods');
  if (gpu.memory.allocated > gpu.memory.total) troubles.push('pods hold more memory than it has');
  for (const holder of gpu.holders ?? []) {
    const name = holder.name ?? holder.uid;
    if (holder.gone) {
      troubles.push(`${name}: GPU ${holder.gone.join(', ')} of its record is gone from the node; ` +
        `${memory(holder.memory)} counts here. Delete the pod to reschedule it`);
    } else if (holder.problem) {
      troubles.push(`${name}: ${holder.problem}`);
    }
  }
  return troubles;
}
