// Puts the page together: one state of the cluster, shown as four pictures with a table each.

import {HistoryChart, describe, sums} from './charts.js';
import {Cluster, freeMemory, gpuTroubles, isUnusable, nodeTroubles} from './cluster.js';
import {Connection} from './connection.js';
import {clock, count, element, measure, memory, minute, part, percent, podName, thousands, usedMemory} from './format.js';
import {HAS_GATES, HAS_ROOM, despiteRoom, shortReason, statements} from './headline.js';
import {CardMap} from './map.js';
import {Palette, PodPaint, VerdictPaint, swatch} from './paint.js';
import {GpuRows, Table} from './table.js';
import {Verdicts, missingMemory} from './verdicts.js';

const $ = (id) => document.getElementById(id);

/** Milliseconds between two readings of what the stream of changes does not carry. */
const FINDINGS = 30_000;
const HISTORY = 60_000;
/** The least time between two questions why pods wait, and between two readings of the memory in use. */
const WHY = 5000;
const USE = 15_000;
/** The most kinds of waiting pods that are explained for the headline. */
const MAX_KINDS = 6;

const cluster = new Cluster();
const palette = new Palette($('map-canvas').getContext('2d', {alpha: false}));
const podPaint = new PodPaint(palette);
const view = {tab: 'cards', pod: null, search: '', show: 'all', order: 'trouble', model: '', namespace: '', sort: ''};
const known = {findings: [], why: new Map(), kinds: new Map(), history: null, verdicts: null, failure: ''};

const connection = new Connection({state: showState, changes: showChanges, status: showStatus});
const map = new CardMap({host: $('map'), space: $('map-space'), canvas: $('map-canvas')}, (found) => {
  showDetails(found);
  keepView();
}, showWindow);
const chart = new HistoryChart({host: $('history-chart'), canvas: $('history-canvas')}, palette, (point) => {
  $('details').replaceChildren(element('p', '', describe(point)));
});

let table = null;
let rows = new GpuRows([]);
let pendingTable = null;
/** The memory that the bars of asked and used memory end at. */
let mostHeld = 1;
let heard = 0;
let dirty = 0;

// --- what the connection brings -----------------------------------------------------------------

function showState(state) {
  const began = performance.now();
  cluster.replace(state);
  heard = Date.now();
  // Another replica may be another leader, with other findings.
  refreshFindings();
  refreshWhy();
  refreshUse();
  if (view.tab === 'history') refreshHistory();
  render();
  // The address may have named it before the GPU was known.
  if (map.selected && view.tab !== 'history') map.goTo(map.selected.node, map.selected.minor);
  measure('state', began);
}

function showChanges(events) {
  const began = performance.now();
  const changed = cluster.apply(events, view);
  heard = Date.now();
  if (changed && view.tab === 'cards') {
    map.update(changed);
    if (changed.some((node) => node.name === map.selected?.node)) showDetails(map.selected);
  } else if (view.tab !== 'history') {
    schedule();
  }
  scheduleHeader();
  if (events.some(({name}) => name === 'pending')) refreshWhy();
  if (view.tab === 'waiting') refreshVerdicts();
  measure('delta', began);
}

/** Draws everything again, at most four times a second: lists of thousands of nodes are sorted for it. */
function schedule() {
  dirty ||= setTimeout(() => {
    dirty = 0;
    render();
  }, 250);
}

/** Draws the head and the rows of the table again, which other things than the changed nodes stand in. */
let headerTimer = 0;
function scheduleHeader() {
  headerTimer ||= setTimeout(() => {
    headerTimer = 0;
    showHeader();
    if (view.tab === 'cards') table?.show(rows, isSelected);
  }, 250);
}

function showStatus(kind, reason) {
  const {replica} = cluster;
  const place = $('connection');
  $('token').hidden = kind !== 'token';
  document.body.classList.toggle('stale', kind !== 'live');
  if (kind === 'live') {
    const leads = replica.leading ? 'this replica leads' : 'this replica stands by, another leads';
    setText(place, `live · ${leads} · version ${replica.version}`);
    return;
  }
  const since = heard ? ` The picture is that of ${clock(heard)}.` : '';
  if (kind === 'token') {
    setText(place, connection.token ? `The token is refused or has ended: ${reason}.${since}` : `This address asks for a token.${since}`);
    if (document.activeElement === document.body) $('token-field').focus();
  } else {
    setText(place, `Trying again: ${reason}.${since}`);
  }
}

/** Sets a text only if it differs, so that screen readers do not read it again. */
function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// --- what the page asks besides --------------------------------------------------------------

async function ask(path) {
  try {
    return await connection.get(path);
  } catch (error) {
    // Breaks are the connection's to report; a refusal is an answer.
    return error.status ? {refused: error.status, reason: error.message} : null;
  }
}

async function refreshFindings() {
  const answer = await ask('doctor');
  if (!answer?.replica) return;
  const wasLeading = cluster.replica?.leading;
  cluster.replica = answer.replica;
  known.findings = answer.findings;
  showHeader();
  if (wasLeading !== answer.replica.leading) showStatus('live');
}

async function refreshHistory() {
  const answer = await ask('history');
  if (!answer?.points) return;
  known.history = answer;
  if (view.tab === 'history') render();
}

/** Finds out why pods wait: pods of one kind, which ask for the same by the same rules, are explained once. */
let whyTimer = 0;
let whyDue = 0;
function refreshWhy() {
  whyTimer ||= setTimeout(async () => {
    await findWhy();
    whyDue = Date.now() + WHY;
    whyTimer = 0;
  }, Math.max(0, whyDue - Date.now()));
}

async function findWhy() {
  const kinds = new Map();
  for (const pod of cluster.pending) {
    if (!kinds.has(pod.kind)) kinds.set(pod.kind, []);
    kinds.get(pod.kind).push(pod);
  }
  const [why, explained] = [new Map(), new Map()];
  for (const pods of [...kinds.values()].sort((a, b) => b.length - a.length).slice(0, MAX_KINDS)) {
    const answer = await ask(explainPath(pods[0]));
    // The node that comes nearest has the reason that counts; others may be too small for the pod even when they are empty.
    const reason = answer?.invalid ?? (answer?.fitting ? despiteRoom(answer) : answer?.verdicts?.[0]?.reason);
    if (reason) why.set(reason, (why.get(reason) ?? 0) + pods.length);
    explained.set(pods[0].kind, {reason, missing: missingMemory(answer)});
  }
  Object.assign(known, {why, kinds: explained});
  showHeader();
  if (view.tab === 'waiting') render();
}

/** How urgent it is to show why a pod waits: those that GPUs block come first, of them those that miss the most memory. */
function urgency(pod) {
  const {reason, missing} = known.kinds.get(pod.kind) ?? {};
  return !reason ? -1 : [HAS_ROOM, HAS_GATES].includes(reason) ? -2 : missing;
}

/** Why a pod waits, in few words. */
function shortWhy(pod) {
  const {reason} = known.kinds.get(pod.kind) ?? {};
  return reason ? shortReason(reason) : '';
}

function explainPath(pod, all = false) {
  return `pods/${encodeURIComponent(pod.namespace)}/${encodeURIComponent(pod.name)}/explain${all ? '?all=true' : ''}`;
}

/** Asks for the memory in use: for each node a device plugin is asked, so that large clusters are asked about seldom. */
let useDue = 0;
async function refreshUse() {
  const isSmall = cluster.nodes.size <= 500;
  const isShown = view.tab === 'pods' || view.tab === 'cards' && isSmall;
  if (!isShown || document.hidden || Date.now() < useDue || !cluster.nodes.size) return;
  useDue = Date.now() + Math.max(USE, 25 * cluster.nodes.size);
  const answer = await ask('state?use=true');
  if (!answer?.nodes) return;
  cluster.takeUse(answer);
  render();
}

/** Asks for the verdicts of all nodes, and again while the cluster changes, at most a tenth of the time. */
let verdictsTimer = 0;
let verdictsDue = 0;
function refreshVerdicts(isNow = false) {
  if (isNow) {
    clearTimeout(verdictsTimer);
    verdictsTimer = verdictsDue = 0;
  }
  verdictsTimer ||= setTimeout(async () => {
    const {pod} = view;
    const began = Date.now();
    const answer = pod && await ask(explainPath(pod, true));
    verdictsDue = Date.now() + Math.max(1000, 10 * (Date.now() - began));
    verdictsTimer = 0;
    if (view.pod !== pod || !answer) return;
    known.failure = answer.refused ? answer.reason : '';
    known.verdicts = answer.refused ? null : new Verdicts(answer, known.verdicts);
    if (view.tab === 'waiting') render();
  }, Math.max(0, verdictsDue - Date.now()));
}

// --- the head of the page ----------------------------------------------------------------------

function showHeader() {
  const {totals} = cluster;
  if (!totals) return;
  const said = statements(cluster, known.findings, known.why);
  const host = $('headline');
  const key = JSON.stringify(said);
  if (host.dataset.key !== key) {
    host.dataset.key = key;
    host.replaceChildren(...said.map(statement));
    document.title = `${said[0].weight === 'good' ? '' : '! '}GPUs: ${said[0].text}`;
  }
  showSums(totals);
  const waits = cluster.pendingTotal ? ` (${count(cluster.pendingTotal, 'pod').split(' ')[0]})` : '';
  setText($('tab-waiting'), `Why pods wait${waits}`);
}

function statement({weight, text, goTo}) {
  const mark = element('span', 'mark', {bad: '✕', warning: '!', good: '✓'}[weight]);
  mark.setAttribute('aria-hidden', 'true');
  const line = element('p', weight, mark);
  if (!goTo) {
    line.append(element('span', '', text));
    return line;
  }
  const button = element('button', 'link', text);
  button.type = 'button';
  button.addEventListener('click', () => {
    if (goTo === 'waiting') return open('waiting');
    Object.assign(view, {show: goTo, search: '', namespace: ''});
    showChoices();
    open('cards');
  });
  line.append(button);
  return line;
}

/** One bar for all memory: allocated, stranded, free, unusable. */
function showSums(totals) {
  const {total, allocated} = totals.memory;
  const {stranded, unusable} = totals;
  const free = Math.max(0, total - allocated - unusable);
  const whole = Math.max(total, allocated, 1);
  const parts = [['allocated', allocated], ['stranded', stranded], ['free', Math.max(0, free - stranded)], ['unusable', unusable]];
  const bar = element('div', 'sum');
  bar.setAttribute('aria-hidden', 'true');
  for (const [kind, bytes] of parts) {
    const part = element('span', kind);
    part.style.width = `${100 * bytes / whole}%`;
    bar.append(part);
  }
  const text = `${count(totals.gpus, 'GPU')} on ${count(totals.nodes, 'node')}. Memory: ${memory(allocated)} of ${memory(total)} allocated `
    + `(${percent(allocated, total)}), ${memory(free)} free, ${stranded ? memory(stranded) : 'nothing'} of it stranded`
    + `${unusable ? `, ${memory(unusable)} on GPUs that take no pods` : ''}. `
    + `Compute: ${percent(totals.core.allocated, totals.core.total)} allocated.`;
  const host = $('sums');
  if (host.dataset.key === text) return;
  host.dataset.key = text;
  host.replaceChildren(bar, element('p', '', text));
}

// --- the pictures -----------------------------------------------------------------------------

function open(tab, pod = view.pod) {
  const isSame = view.tab === tab && view.pod === pod;
  if (document.body.dataset.tab && view.tab !== tab) view.sort = '';
  Object.assign(view, {tab, pod});
  for (const button of $('tabs').children) {
    const isThis = button.id === `tab-${tab}`;
    button.setAttribute('aria-selected', String(isThis));
    button.tabIndex = isThis ? 0 : -1;
  }
  $('view').setAttribute('aria-labelledby', `tab-${tab}`);
  document.body.dataset.tab = tab;
  if (!isSame) {
    table = pendingTable = null;
    if (tab !== 'history') showDetails(map.selected);
    else setText($('details'), 'Point at a time, or select one.');
  }
  keepView();
  if (tab === 'history') refreshHistory();
  if (tab === 'waiting') refreshVerdicts(true);
  refreshUse();
  render();
}

/** What the address keeps besides the tab and the pod, unless it is as at the start. */
const KEPT = ['search', 'namespace', 'show', 'order', 'model', 'sort'];
const AT_START = {...view};

/** Writes the view into the address: loaded again or by another reader, it shows the same. */
function keepView() {
  const {tab, pod} = view;
  const path = [tab, ...tab === 'waiting' && pod ? [pod.namespace, pod.name] : []].map(encodeURIComponent).join('/');
  const kept = new URLSearchParams(KEPT.filter((name) => view[name] !== AT_START[name]).map((name) => [name, view[name]]));
  if (map.selected) kept.set('gpu', `${map.selected.node}/${map.selected.minor ?? ''}`);
  const hash = `#${path}${kept.size ? `?${kept}` : ''}`;
  if (location.hash !== hash) history.replaceState(null, '', hash);
}

/** Reads the view from the address. */
function readView() {
  const [path, query = ''] = location.hash.slice(1).split('?');
  const [tab, namespace, name] = path.split('/').map(decoded);
  const kept = new URLSearchParams(query);
  for (const choice of KEPT) view[choice] = kept.get(choice) ?? AT_START[choice];
  const [node, minor] = (kept.get('gpu') ?? '').split('/');
  map.selected = node ? {node, minor: minor ? Number(minor) : undefined} : null;
  showChoices();
  open($(`tab-${tab}`) ? tab : 'cards', name ? {namespace, name} : null);
}

/** A part of an address; as it stands where it is not valid. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Shows the choices of the view in their fields. */
function showChoices() {
  for (const id of ['search', 'show', 'order']) $(id).value = view[id];
  // A choice that no field has is none.
  for (const id of ['show', 'order']) if (!$(id).value) $(id).value = view[id] = AT_START[id];
}

/** Fills a field with choices, and keeps the one of the view, even if it is not among them now. */
function offer(id, all, names) {
  const host = $(id);
  const offered = view[id] && !names.includes(view[id]) ? [...names, view[id]] : names;
  const key = offered.join('\n');
  if (host.dataset.key !== key) {
    host.dataset.key = key;
    host.replaceChildren(new Option(all, ''), ...offered.map((name) => new Option(name || 'unknown', name)));
  }
  if (host.value !== view[id]) host.value = view[id];
}

/** A table beside the picture, whose order the address keeps. */
function makeTable(label, columns, onPick = null) {
  return new Table($('table'), label, columns, onPick, view.sort, (sort) => {
    view.sort = sort;
    keepView();
  });
}

function render() {
  if (!cluster.totals) return;
  showHeader();
  document.body.classList.toggle('empty', !cluster.nodes.size);
  const namespaces = cluster.namespaces();
  podPaint.assignColours(namespaces);
  offer('namespace', 'all', namespaces);
  ({cards: renderCards, waiting: renderWaiting, history: renderHistory, pods: renderPods})[view.tab]();
}

function renderCards() {
  const nodes = cluster.choose(view);
  map.show(nodes, podPaint);
  setText($('sentence'), cluster.nodes.size === nodes.length ? hiddenNames() : `${count(nodes.length, 'node')} of ${thousands(cluster.nodes.size)} match. ${hiddenNames()}`);
  showLegend(podPaint.legend());
  table ??= makeTable('GPUs and their pods', [
    ['Node', ({node}) => node.name],
    ['GPU', ({gpu}) => gpu ? String(gpu.minor) : '', 'number'],
    ['Allocated', ({gpu}) => gpu ? part(gpu.memory.allocated, gpu.memory.total) : '', 'number wide', ({gpu}) => gpu?.memory.allocated],
    ['Free', freeText, 'number', ({gpu}) => gpu && freeMemory(gpu)],
    ['Problems, pods', problemsAndPods, 'rest'],
  ], pickGpu);
  showCardTable(nodes);
}

/** Which nodes the map shows: it may have thousands more than the window has space for. */
function showWindow(first, last, all) {
  const order = view.tab === 'cards' ? `, ${$('order').selectedOptions[0].text}` : '';
  setText($('map-window'), last - first + 1 < all ? `Nodes ${thousands(first)} to ${thousands(last)} of ${thousands(all)}${order}; scroll for more` : count(all, 'node'));
}

function showCardTable(nodes) {
  rows = new GpuRows(nodes);
  table?.show(rows, isSelected);
}

/** The free memory of a row's GPU, and whether pods can get it. */
function freeText({node, gpu}) {
  if (!gpu) return '';
  if (!freeMemory(gpu)) return 'none';
  return `${memory(freeMemory(gpu))}${isUnusable(node, gpu) ? ', unusable' : gpu.stranded ? ', stranded' : ''}`;
}

function problemsAndPods({node, gpu}) {
  const problems = [...nodeTroubles(node), ...gpu ? gpuTroubles(gpu) : []].join('; ');
  const pods = (gpu?.holders ?? []).map(podName).join(', ');
  if (!problems) return pods;
  return element('span', '', element('span', 'bad', problems), pods && ` · ${pods}`);
}

function hiddenNames() {
  return cluster.namesHidden ? 'Names of pods that your token may not list are hidden.' : '';
}

function pickGpu({node, gpu}) {
  map.goTo(node.name, gpu?.minor);
}

function isSelected({node, gpu}) {
  return map.selected?.node === node.name && map.selected.minor === gpu?.minor;
}

function renderWaiting() {
  pendingTable ??= new Table($('pending'), 'Pods that wait', [
    ['Pod', podCell, '', podName], ['Asks for', (pod) => pod.asked], ['Why', shortWhy, 'rest'],
  ], (pod) => open('waiting', pod));
  const words = view.search.toLowerCase();
  const pending = cluster.pending.filter((pod) => podName(pod).toLowerCase().includes(words) && (!view.namespace || pod.namespace === view.namespace));
  const isChosen = (pod) => pod.namespace === view.pod?.namespace && pod.name === view.pod?.name;
  pendingTable.show(pending, isChosen);
  // Not before it is known which pods the GPUs block.
  if (!view.pod && pending.length && cluster.pending.some((pod) => known.kinds.has(pod.kind))) {
    return open('waiting', pending.reduce((first, pod) => urgency(pod) > urgency(first) ? pod : first));
  }
  const {verdicts} = known;
  const isOfPod = verdicts && view.pod && verdicts.explanation.name === view.pod.name && verdicts.explanation.namespace === view.pod.namespace;
  setText($('sentence'), whyNot(isOfPod ? verdicts.explanation : null));
  if (!isOfPod || !verdicts.nodes.size) {
    map.show(isOfPod ? [] : cluster.choose({...view, search: '', namespace: '', order: 'name'}), podPaint);
    showLegend(isOfPod ? [] : podPaint.legend());
    table = null;
    $('table').replaceChildren();
    return;
  }
  const paint = new VerdictPaint(palette, verdicts);
  const nodes = verdicts.sort([...cluster.nodes.values()]);
  map.show(nodes, paint);
  showLegend(paint.legend());
  table ??= makeTable('Verdicts of nodes and GPUs', [
    ['Node', ({node}) => node.name],
    ['GPU', ({gpu}) => gpu ? String(gpu.minor) : '', 'number'],
    ['Free', freeText, 'number wide', ({gpu}) => gpu && freeMemory(gpu)],
    ['Verdict', (row) => verdictOf(row).fits ? 'has room' : verdictOf(row).lacks],
    ['Reason', (row) => verdictOf(row).reason, 'rest'],
  ], pickGpu);
  rows = new GpuRows(nodes);
  table.show(rows, isSelected);
}

function verdictOf({node, gpu}) {
  return known.verdicts?.of(node, gpu ?? {}) ?? {fits: false, lacks: 'not evaluated yet', reason: ''};
}

/** The explanation in a sentence or two. */
function whyNot(explanation) {
  if (!view.pod && cluster.namesHidden) return 'The page explains pods that your token may list.';
  if (!view.pod) return cluster.pendingTotal ? 'Choose a pod.' : 'No pod waits for a GPU.';
  const name = `${view.pod.namespace}/${view.pod.name}`;
  if (!explanation) return known.failure || `Asking why ${name} waits.`;
  const {asked, invalid, warning, node, assumed, fitting, nodes, summary, kubeScheduler} = explanation;
  const doubt = warning ? ` Warning: ${warning}` : '';
  if (node) return `${name} asks for ${asked}; it ${assumed ? 'is being bound to' : 'is on'} node ${node}.${doubt}`;
  // The sentences are those of `kubectl gpushare explain`: the scheduler words them for all clients.
  const words = [...summary ?? [], ...kubeScheduler ? [`kube-scheduler says: ${kubeScheduler}`] : []].join(' ');
  if (invalid) return `${name} waits. ${words}`;
  return `${name} asks for ${asked}; ${thousands(fitting)} of ${count(nodes, 'node')} ${fitting === 1 ? 'takes' : 'take'} it.${doubt} ${words}`;
}

function renderHistory() {
  const {history: answer} = known;
  if (!answer) return setText($('sentence'), 'Reading the history.');
  const models = [...new Set(answer.points.flatMap((point) => Object.keys(point.models)))].sort();
  offer('model', 'all models', models.filter(Boolean));
  const points = sums(answer, view.model);
  setText($('sentence'), points.length
    ? `Since ${minute(points[0].time)}, one point a minute. A replica of the scheduler remembers 24 hours, and nothing from before its start.`
    : 'The scheduler has just started: the first point comes after a minute.');
  chart.show(points);
  showLegend(chart.legend());
  table ??= makeTable('Memory by minute', [
    ['Time', (point) => minute(point.time), '', (point) => point.time],
    ['Allocated', (point) => memory(point.allocated), 'number', (point) => point.allocated],
    ['In use', (point) => point.used === undefined ? 'unknown' : memory(point.used), 'number', (point) => point.used ?? -1],
    ['Free', (point) => memory(point.free), 'number', (point) => point.free],
    ['Stranded', (point) => memory(point.stranded), 'number', (point) => point.stranded],
    ['Waiting', (point) => String(point.pending), 'number'],
  ], (point) => chart.selectTime(point.time));
  table.show([...points].reverse());
}

function renderPods() {
  const pods = cluster.pods(view.search, view.namespace);
  const measured = pods.filter((pod) => pod.used !== undefined);
  const held = measured.reduce((sum, pod) => sum + pod.memory, 0);
  const used = measured.reduce((sum, pod) => sum + pod.used, 0);
  const unknown = pods.length - measured.length;
  let text = `${count(pods.length, 'pod')} ${pods.length === 1 ? 'has' : 'have'} a share of a GPU. `;
  if (measured.length) text += `${unknown ? `Of ${measured.length} the use is known: they` : 'They'} use ${memory(used)} of the ${memory(held)} that they asked for (${percent(used, held)}). `;
  if (unknown) text += `The use of ${count(unknown, 'pod')} is unknown${unknownReasons()}. `;
  setText($('sentence'), text + hiddenNames());
  mostHeld = pods.reduce((most, pod) => Math.max(most, pod.memory, pod.used ?? 0), 1);
  showLegend([
    [palette.pattern('rising', '--pod-a', '--free'), 'asked for, and not used'],
    [palette.colour('--pod-a'), 'used'],
    [palette.pattern('dots', '--other', '--free'), 'asked for, use unknown'],
  ]);
  const bar = (pod) => {
    const whole = element('span', pod.used === undefined ? 'asked unknown' : 'asked');
    whole.setAttribute('aria-hidden', 'true');
    whole.style.width = `${100 * pod.memory / mostHeld}%`;
    const part = element('span', 'used');
    part.style.width = `${100 * Math.min(1, (pod.used ?? 0) / pod.memory)}%`;
    whole.append(part);
    return whole;
  };
  table ??= makeTable('Memory that pods asked for and use', [
    ['Pod', podCell, '', podName],
    ['Asked and used', bar, 'picture', (pod) => pod.used === undefined ? -1 : pod.used / pod.memory],
    ['May use', (pod) => memory(pod.memory), 'number', (pod) => pod.memory],
    ['Used', (pod) => element('span', pod.overShare ? 'bad' : '', usedMemory(pod)), 'number', (pod) => pod.used ?? -1],
    ['Compute', (pod) => pod.core ? `${pod.core} %` : '', 'number', (pod) => pod.core],
    ['Asked for', (pod) => pod.asked ?? ''],
    ['Place', (pod) => `${pod.node}, GPU ${pod.gpus.join(', ')}`],
  ]);
  table.show(pods);
}

/** The name of a pod with a button that copies it. */
function podCell(pod) {
  if (!pod.name) return podName(pod);
  const button = element('button', 'copy');
  button.type = 'button';
  button.title = 'Copy the name';
  button.setAttribute('aria-label', `Copy ${podName(pod)}`);
  button.addEventListener('click', (event) => {
    event.stopPropagation();
    copy(podName(pod), button);
  });
  return element('span', '', podName(pod), button);
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS on an address that is not the loopback's, browsers have no clipboard for scripts.
    const field = element('textarea', 'unseen', text);
    document.body.append(field);
    field.select();
    document.execCommand('copy');
    field.remove();
    button.focus();
  }
  button.classList.add('done');
  setText($('copied'), `${text} is copied.`);
}

/** The reasons for which the use is unknown, with numbers of nodes. */
function unknownReasons() {
  const reasons = Object.entries(cluster.useUnknown).map(([reason, nodes]) => `${reason} (${count(nodes.length, 'node')})`);
  return reasons.length ? `: ${reasons.join('; ')}` : '';
}

function showLegend(entries) {
  const host = $('legend');
  const key = JSON.stringify([entries.map(([, text]) => text), palette.colour('--paper')]);
  if (host.dataset.key === key) return;
  host.dataset.key = key;
  host.replaceChildren(...entries.map(([fill, text]) => element('li', '', swatch(fill), text)));
}

/** The selected GPU in words, or the one under the pointer. */
function showDetails(found) {
  const host = $('details');
  const node = found && cluster.nodes.get(found.node);
  if (!node) return host.replaceChildren(element('p', 'hint', 'Point at a GPU, or select one, for its pods.'));
  const gpu = node.gpus.find((gpu) => gpu.minor === found.minor);
  const lines = [element('h2', '', gpu ? `${node.name}, GPU ${gpu.minor}` : node.name)];
  const say = (text, kind = '') => lines.push(element('p', kind, text));
  for (const trouble of [...nodeTroubles(node), ...gpu ? gpuTroubles(gpu) : []]) say(trouble, 'bad');
  if (gpu) {
    const verdict = view.tab === 'waiting' && known.verdicts?.of(node, gpu);
    if (verdict) say(verdict.fits ? 'The pod has room here.' : `${verdict.lacks}: ${verdict.reason}`);
    const stranded = gpu.stranded ? ', stranded: no typical pod fits' : '';
    const out = `${memory(freeMemory(gpu))} free cannot be used: the ${!gpu.healthy ? 'GPU is unhealthy' : gpu.closed ? 'GPU is closed' : 'node takes no pods'}`;
    const free = isUnusable(node, gpu) ? out : `${memory(freeMemory(gpu))} free${stranded}`;
    say(`${[node.model, `${memory(gpu.memory.allocated)} of ${memory(gpu.memory.total)} allocated`, free,
      `${percent(gpu.core.allocated, gpu.core.total)} of compute`, gpu.used === undefined ? '' : `${memory(gpu.used)} in use`].filter(Boolean).join(' · ')}`);
    const list = element('ul');
    for (const holder of gpu.holders ?? []) {
      const used = holder.used === undefined ? '' : `, uses ${usedMemory(holder)}`;
      const core = holder.core ? `, ${holder.core} % compute` : '';
      const gone = holder.gone ? `, counted here because GPU ${holder.gone.join(', ')} of its record is gone` : '';
      list.append(element('li', '', podCell(holder), `: ${memory(holder.memory)}${core}${used}${holder.assumed ? ', being bound' : ''}${gone}`));
    }
    if (list.children.length) lines.push(list);
  }
  host.replaceChildren(...lines);
  if (table && map.selected) {
    const place = map.places.get(map.selected.node);
    const at = place === undefined ? -1 : rows.find(place, map.selected.minor);
    table.show(rows, isSelected);
    if (at >= 0 && document.activeElement !== table.scroller) table.reveal(at);
  }
}

// --- what people do ------------------------------------------------------------------------------

for (const button of $('tabs').children) {
  button.addEventListener('click', () => open(button.id.slice(4)));
}
$('tabs').addEventListener('keydown', (event) => {
  const tabs = [...$('tabs').children];
  const at = tabs.indexOf(document.activeElement);
  const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1}[event.key];
  if (to === undefined) return;
  const tab = tabs[(to + tabs.length) % tabs.length];
  open(tab.id.slice(4));
  tab.focus();
  event.preventDefault();
});
let typing = 0;
$('search').addEventListener('input', () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    view.search = $('search').value;
    keepView();
    render();
  }, 120);
});
for (const id of ['show', 'order', 'model', 'namespace']) {
  $(id).addEventListener('change', () => {
    view[id] = $(id).value;
    keepView();
    render();
  });
}
$('zoom-in').addEventListener('click', () => map.zoomBy(1));
$('zoom-out').addEventListener('click', () => map.zoomBy(-1));
$('zoom-fit').addEventListener('click', () => map.zoomBy(null));
$('token').addEventListener('submit', (event) => {
  event.preventDefault();
  connection.useToken($('token-field').value.trim());
  $('token-field').value = '';
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  palette.read();
  chart.draw();
  render();
});
document.addEventListener('visibilitychange', () => document.hidden || render());

readView();
addEventListener('hashchange', readView);
showDetails(map.selected);
setInterval(() => document.hidden || refreshFindings(), FINDINGS);
setInterval(() => view.tab === 'history' && !document.hidden && refreshHistory(), HISTORY);
setInterval(() => cluster.pendingTotal && !document.hidden && refreshWhy(), FINDINGS);
setInterval(refreshUse, 1000);
connection.run();
