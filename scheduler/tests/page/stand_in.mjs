// A server with the page's files and the read API's routes over a made-up cluster: for sizes and faults that no simulated cluster
// of this repository has. The test compares the fields of its JSON with those of the real scheduler.

import {createServer} from 'node:http';
import {readFileSync} from 'node:fs';
import {fileURLToPath} from 'node:url';

const PAGE = fileURLToPath(new URL('../../page/', import.meta.url));
const TYPES = {html: 'text/html; charset=utf-8', css: 'text/css; charset=utf-8', js: 'text/javascript; charset=utf-8', svg: 'image/svg+xml'};
/** As scheduler/src/page.rs sets it; the test of the real scheduler compares. */
export const POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
  + "form-action 'none'; frame-ancestors 'none'";

const GIB = 2 ** 30;
const MODELS = [['NVIDIA-A100-SXM4-80GB', 80 * GIB], ['NVIDIA-A10', 24 * GIB], ['Tesla-T4', 16 * GIB]];
/** Sizes of pods in GiB. */
const SIZES = [4, 6, 8, 10, 12, 16, 20, 24, 40];

/** The same numbers for the same seed. */
function dice(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** A made-up cluster. `fill` is the part of each GPU up to which pods are put on it; `typical` pods ask for so many GiB at least. */
export class MadeUp {
  constructor({nodes = 40, gpus = 8, fill = 0.8, seed = 1, trouble = 0.01, used = true, names = (n) => `train-${n}`, pending = 0, sizes = SIZES, typical = 4, over = 0} = {}) {
    Object.assign(this, {typical: typical * GIB, over, roll: dice(seed), names, used, sizes, serial: 0, revision: 1, epoch: `made.${seed}`, leading: true});
    this.nodes = new Map();
    for (let at = 0; at < nodes; at += 1) {
      const [model, total] = MODELS[Math.floor(this.roll() * (at % 7 ? 2 : 3))];
      const node = {name: `gpu-${String(at + 1).padStart(String(nodes).length, '0')}`, model, gpus: []};
      if (this.roll() < trouble / 2) node.plugin = 'its device plugin has not served kubelet for 4 minutes';
      for (let minor = 0; minor < gpus; minor += 1) {
        const gpu = this.gpu(minor, total, node.name);
        gpu.healthy = this.roll() >= trouble;
        while (gpu.memory.allocated < total * fill && this.add(gpu));
        node.gpus.push(gpu);
      }
      this.nodes.set(node.name, node);
    }
    this.pending = [];
    for (let n = 0; n < pending; n += 1) {
      this.pending.push({namespace: 'ml', name: this.names(`waits-${n}`), uid: `waits-${n}`, asked: n % 3 ? '60 GiB' : '20 GiB, 50 % core, over 2 GPUs', kind: n % 3 ? 1 : 2});
    }
    this.points = [];
  }

  gpu(minor, total, node) {
    return {
      minor, uuid: `GPU-${node}-${minor}`, healthy: true, memory: {total, allocated: 0}, core: {total: 100, allocated: 0},
      sharers: {total: 20, allocated: 0}, holders: [],
    };
  }

  /** Puts one more pod on a GPU, if one fits. */
  add(gpu) {
    const free = gpu.memory.total - gpu.memory.allocated;
    const fitting = this.sizes.filter((size) => size * GIB <= free);
    if (!fitting.length) return false;
    const size = fitting[Math.floor(this.roll() * fitting.length)] * GIB;
    const core = Math.min(100 - gpu.core.allocated, Math.round(100 * size / gpu.memory.total));
    this.serial += 1;
    const holder = {namespace: ['ml', 'vision', 'search'][this.serial % 3], name: this.names(this.serial), uid: `u-${this.serial}`, asked: `${size / GIB} GiB`, memory: size, core};
    if (this.used) holder.used = Math.round(size * (0.15 + 0.8 * this.roll()));
    if (this.serial <= this.over) Object.assign(holder, {used: 2 * size, overShare: true});
    gpu.holders.push(holder);
    this.sum(gpu);
    return true;
  }

  sum(gpu) {
    gpu.memory.allocated = gpu.holders.reduce((sum, holder) => sum + holder.memory, 0);
    gpu.core.allocated = gpu.holders.reduce((sum, holder) => sum + holder.core, 0);
    gpu.sharers.allocated = gpu.holders.length;
    if (this.used) gpu.used = gpu.holders.reduce((sum, holder) => sum + holder.used, 0);
    const free = gpu.memory.total - gpu.memory.allocated;
    delete gpu.stranded;
    if (gpu.healthy && free > 0 && free < this.typical) gpu.stranded = free;
  }

  /** Ends a pod on some GPU and starts another; returns the node. */
  change(node = [...this.nodes.values()][Math.floor(this.roll() * this.nodes.size)]) {
    const gpu = node.gpus[Math.floor(this.roll() * node.gpus.length)];
    gpu.holders.shift();
    this.sum(gpu);
    this.add(gpu);
    return node;
  }

  totals(nodes = this.nodes.values()) {
    const sums = {nodes: 0, gpus: 0, unhealthy: 0, memory: {total: 0, allocated: 0}, stranded: 0, unusable: 0, core: {total: 0, allocated: 0}};
    for (const node of nodes) {
      sums.nodes += node.gpus.length ? 1 : 0;
      for (const gpu of node.gpus) {
        sums.gpus += 1;
        sums.unhealthy += gpu.healthy ? 0 : 1;
        const isUnusable = !gpu.healthy || node.plugin;
        sums.stranded += isUnusable ? 0 : gpu.stranded ?? 0;
        sums.unusable += isUnusable ? Math.max(0, gpu.memory.total - gpu.memory.allocated) : 0;
        for (const kind of ['memory', 'core']) {
          sums[kind].total += gpu[kind].total;
          sums[kind].allocated += gpu[kind].allocated;
        }
      }
    }
    return sums;
  }

  models() {
    const byModel = {};
    for (const node of this.nodes.values()) (byModel[node.model] ??= []).push(node);
    return Object.fromEntries(Object.entries(byModel).map(([model, nodes]) => [model, this.totals(nodes)]));
  }

  id() {
    return `${this.epoch}-${this.revision}`;
  }

  replica() {
    return {version: '0.1.0', leading: this.leading, filterRequests: 7, lastFilterSeconds: 1};
  }

  state(asksUse = false) {
    return {
      apiVersion: 'v1', revision: this.id(), time: new Date().toISOString(), replica: this.replica(), totals: this.totals(), models: this.models(),
      nodes: [...this.nodes.values()].map((node) => asksUse ? node : withoutUse(node)), pending: this.pending, pendingTotal: this.pending.length, ...this.namesHidden ? {namesHidden: true} : {},
    };
  }

  doctor() {
    return {apiVersion: 'v1', replica: this.replica(), findings: []};
  }

  history(minutes = 24 * 60) {
    const points = [];
    const now = Math.floor(Date.now() / 60_000) * 60;
    const models = this.models();
    for (let ago = minutes; ago > 0; ago -= 1) {
      const time = now - 60 * ago;
      const load = 0.55 + 0.35 * Math.sin((minutes - ago) / 150) * Math.sin((minutes - ago) / 410);
      const past = {};
      for (const [model, totals] of Object.entries(models)) {
        const allocated = Math.round(totals.memory.total * load);
        past[model] = {...totals, memory: {total: totals.memory.total, allocated}, stranded: Math.round((totals.memory.total - totals.unusable - allocated) * 0.4 * load)};
      }
      points.push({time, pending: Math.max(0, Math.round(60 * (load - 0.72))), models: past});
    }
    return {apiVersion: 'v1', points};
  }

  explain(namespace, name) {
    const pod = this.pending.find((pod) => pod.namespace === namespace && pod.name === name);
    if (!pod) return null;
    const needed = Number.parseInt(pod.asked) * GIB;
    const memory = 'not enough free GPU memory on any one GPU of the node';
    const reasons = {};
    const verdicts = [];
    let fitting = 0;
    for (const node of this.nodes.values()) {
      const gpus = node.gpus.map((gpu) => {
        const free = gpu.healthy ? gpu.memory.total - gpu.memory.allocated : 0;
        const fits = gpu.healthy && free >= needed;
        const reason = fits ? {} : {reason: gpu.healthy ? memory : 'too few healthy GPUs on the node'};
        const lacks = fits ? {} : {lacks: gpu.healthy ? `lacks ${(needed - free) / GIB} GiB` : 'is unhealthy'};
        return {minor: gpu.minor, fits, ...reason, ...lacks, needed, free, neededCore: 0, freeCore: 100 - gpu.core.allocated};
      });
      let reason = gpus.some((gpu) => gpu.fits) ? '' : memory;
      if (node.plugin) reason = "node's device plugin does not serve kubelet now, or is tried again with few pods at a time";
      if (!reason) fitting += 1;
      else reasons[reason] = (reasons[reason] ?? 0) + 1;
      verdicts.push({node: node.name, fits: !reason, ...reason ? {reason} : {}, gpus});
    }
    const summary = fitting ? ['Its devices are no reason to wait.'] : ['Nothing that ends makes room for it.'];
    return {apiVersion: 'v1', ...pod, nodes: this.nodes.size, fitting, reasons, verdicts, summary, kubeScheduler: '1 Insufficient cpu'};
  }
}

/** The read API tells the use only if it is asked for it. */
function withoutUse(node) {
  const strip = ({used, overShare, ...rest}) => rest;
  return {...node, gpus: node.gpus.map((gpu) => ({...strip(gpu), holders: gpu.holders.map(strip)}))};
}

/** Serves a made-up cluster. The answer has functions for faults and events. */
export async function serve(cluster, {latency = 0} = {}) {
  const control = {cluster, isAway: false, token: null, followers: new Set(), requests: []};
  const server = createServer((request, response) => {
    const {pathname, searchParams} = new URL(request.url, 'http://localhost');
    control.requests.push(pathname);
    if (control.isAway) return request.socket.destroy();
    response.setHeader('content-security-policy', POLICY);
    if (!pathname.startsWith('/v1/')) return file(response, pathname);
    if (control.token && request.headers.authorization !== `Bearer ${control.token}`) {
      response.writeHead(401);
      return response.end('the token is not known\n');
    }
    const path = pathname.slice(4).split('/').map(decodeURIComponent);
    if (path[0] === 'changes') return follow(control, response, searchParams.get('since'));
    const current = control.cluster;
    const answer = {
      state: () => current.state(searchParams.get('use') === 'true'), doctor: () => current.doctor(), history: () => current.history(), pods: () => current.explain(path[1], path[2]),
    }[path[0]]?.();
    if (!answer) {
      response.writeHead(404);
      return response.end('there is no such pod\n');
    }
    response.setHeader('content-type', 'application/json');
    setTimeout(() => response.end(JSON.stringify(answer)), latency);
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  control.url = `http://127.0.0.1:${server.address().port}/`;
  control.close = () => {
    for (const follower of control.followers) follower.destroy();
    server.closeAllConnections();
    return new Promise((resolve) => server.close(resolve));
  };
  /** Ends all connections and refuses new ones, until `back`. */
  control.away = () => {
    control.isAway = true;
    server.closeAllConnections();
  };
  control.back = () => {
    control.isAway = false;
  };
  /** Sends the new states of nodes, names of removed ones, or other pods that wait, as one revision. */
  control.send = ({nodes = [], removed = [], pending = null}) => {
    control.cluster.revision += 1;
    const events = nodes.map((node) => ['node', withoutUse(node)]);
    events.push(...removed.map((name) => ['removed', {name}]));
    if (pending) events.push(['pending', pending]);
    const text = events.map(([name, data]) => `event: ${name}\ndata: ${JSON.stringify(data)}\n\n`).join('') + totals(control.cluster);
    for (const follower of control.followers) follower.write(text);
  };
  return control;
}

function totals(cluster) {
  const data = {totals: cluster.totals(), models: cluster.models(), pendingTotal: cluster.pending.length};
  return `id: ${cluster.id()}\nevent: totals\ndata: ${JSON.stringify(data)}\n\n`;
}

function follow(control, response, since) {
  response.writeHead(200, {'content-type': 'text/event-stream', 'cache-control': 'no-cache'});
  control.followers.add(response);
  response.on('close', () => control.followers.delete(response));
  const {cluster} = control;
  if (since !== cluster.id()) response.write('event: reset\ndata: {}\n\n');
  response.write(totals(cluster));
}

function file(response, pathname) {
  const name = pathname === '/' ? 'index.html' : pathname.slice(1);
  try {
    if (!/^[a-z]+\.[a-z]+$/.test(name)) throw new Error('no such file');
    const content = readFileSync(PAGE + name);
    response.writeHead(200, {'content-type': TYPES[name.split('.')[1]], 'cache-control': 'no-store'});
    response.end(content);
  } catch {
    response.writeHead(404);
    response.end();
  }
}
