// What is wrong, in the fewest words: the first thing that a reader sees.

import {count, memory, percent, thousands} from './format.js';

/** Instead of a reason, for a pod that some node has room for. */
export const HAS_ROOM = 'GPUs have room, see kubectl describe pod';

/** The same, for a pod that kube-scheduler does not try yet. */
export const HAS_GATES = 'its scheduling gates hold it back';

/** Why a pod waits that some node has room for. */
export const despiteRoom = ({gates}) => gates?.length ? HAS_GATES : HAS_ROOM;

/** Reasons in short, by the words that filter's texts begin or go on with; others are shown as they are. */
const SHORT = [
  [/^not enough free GPU memory/, 'not enough memory free on any one GPU'],
  [/^not enough free GPU core/, 'not enough compute free on any one GPU'],
  [/^too few GPUs of the node have room/, 'too few GPUs have room at the same time'],
  [/^too few healthy GPUs/, 'too few healthy GPUs'],
  [/^request is larger/, 'larger than any GPU'],
  [/device plugin does not serve/, 'the device plugin is away'],
];

export function shortReason(reason) {
  return SHORT.find(([pattern]) => pattern.test(reason))?.[1] ?? reason;
}

/** Stranded memory is worth a warning from these parts of free and of all memory on. */
const STRANDED = {ofFree: 0.1, ofAll: 0.02};
/** The part of memory from which on a cluster counts as full. */
const FULL = 0.95;

/**
 * Statements about the cluster, the worst first: `weight` is "bad", "warning" or "good", and `goTo` what to look at.
 * `why` counts waiting pods by reason, as far as it is known.
 */
export function statements(cluster, findings, why) {
  const found = [];
  const say = (weight, text, goTo) => found.push({weight, text, goTo});
  const {totals, replica, nodes} = cluster;
  if (replica?.notReady) say('bad', `The scheduler is not ready: ${replica.notReady}.`);
  for (const finding of findings) {
    if (!finding.object && finding.severity === 'error') say('bad', `${sentence(finding.message)} ${sentence(finding.remedy)}`);
  }
  if (!nodes.size) {
    say('warning', 'No node shares GPUs yet. Label a node with gpushare=true, and see kubectl gpushare doctor.');
  }
  const {away, reports, records} = cluster.troubles();
  if (totals.unhealthy) say('bad', `${thousands(totals.unhealthy)} of ${count(totals.gpus, 'GPU')} ${totals.unhealthy === 1 ? 'is' : 'are'} unhealthy.`, 'trouble');
  if (away) say('bad', `${count(away, 'node')} ${away === 1 ? 'takes' : 'take'} no or few pods: the device plugin is away.`, 'trouble');
  if (reports) say('bad', `${count(reports, 'node')} ${reports === 1 ? 'has' : 'have'} a wrong report of devices.`, 'trouble');
  if (records) say('bad', `${count(records, 'GPU')} with pods that hold too much, or whose devices are not known for sure.`, 'trouble');
  if (cluster.pendingTotal) say('warning', waiting(cluster.pendingTotal, why), 'waiting');
  const {total, allocated} = totals.memory;
  const usable = total - totals.unusable;
  const free = Math.max(0, usable - allocated);
  if (allocated >= usable * FULL && usable) {
    say('warning', `${percent(allocated, total)} of memory is allocated: the GPUs are full.`);
  } else if (totals.stranded >= free * STRANDED.ofFree && totals.stranded > total * STRANDED.ofAll) {
    say('warning', `${percent(totals.stranded, free)} of free memory is stranded: ${memory(totals.stranded)} on which no typical pod fits.`, 'stranded');
  }
  if (!found.length) say('good', `Nothing is wrong: ${count(totals.gpus, 'GPU')} healthy, no pod waits.`);
  return found;
}

function waiting(n, why) {
  const head = `${count(n, 'pod')} ${n === 1 ? 'waits' : 'wait'} for a GPU`;
  const reasons = [...why].sort((a, b) => b[1] - a[1]);
  if (reasons.length === 1 && reasons[0][1] === n) return `${head}: ${shortReason(reasons[0][0])}.`;
  const parts = reasons.map(([reason, pods]) => `${pods}: ${shortReason(reason)}`);
  // Only the most frequent kinds of pods are explained.
  const rest = n - reasons.reduce((sum, [, pods]) => sum + pods, 0);
  if (parts.length && rest > 0) parts.push(`${rest}: other or unknown reasons`);
  return parts.length ? `${head} (${parts.join('; ')}).` : `${head}.`;
}

function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}.` : '';
}

