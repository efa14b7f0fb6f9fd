// The verdicts of all nodes and GPUs on one pod, as `explain` gives them: the same evaluation as that of filter.

export class Verdicts {
  /** `known` are the verdicts on the same pod a moment ago: reasons keep their colours. */
  constructor(explanation, known) {
    this.explanation = explanation;
    this.nodes = new Map();
    for (const verdict of explanation.verdicts ?? []) {
      const gpus = new Map((verdict.gpus ?? []).map((gpu) => [gpu.minor, gpu]));
      const isExplained = (verdict.gpus ?? []).some((gpu) => gpu.reason === verdict.reason);
      this.nodes.set(verdict.node, {...verdict, gpus, isExplained});
    }
    this.cache = new Map();
    this.reasons = known?.explanation.uid === explanation.uid ? known.reasons : [];
    // The reason that most GPUs have comes first, so that it has the first colour.
    for (const [reason] of this.counts().byReason) if (!this.reasons.includes(reason)) this.reasons.push(reason);
    // A node that kube-scheduler refuses has no verdicts of GPUs.
    for (const {fits, reason} of this.nodes.values()) if (!fits && !this.reasons.includes(reason)) this.reasons.push(reason);
  }

  indexOf(reason) {
    return this.reasons.indexOf(reason);
  }

  /** The verdict of a GPU: whether the pod fits, else the reason and what is lacking; undefined if explain has none. */
  of(node, gpu) {
    const key = `${node.name}/${gpu.minor}`;
    let verdict = this.cache.get(key);
    if (!verdict) {
      const ofNode = this.nodes.get(node.name);
      if (!ofNode) return undefined;
      this.cache.set(key, verdict = combine(ofNode, ofNode.gpus.get(gpu.minor)));
    }
    return verdict;
  }

  /** The number of GPUs that fit, and of the others by reason, the most frequent first. */
  counts() {
    let fits = 0;
    const byReason = new Map();
    for (const ofNode of this.nodes.values()) {
      for (const gpu of ofNode.gpus.values()) {
        const verdict = combine(ofNode, gpu);
        if (verdict.fits) fits += 1;
        else byReason.set(verdict.reason, (byReason.get(verdict.reason) ?? 0) + 1);
      }
    }
    return {fits, byReason: [...byReason].sort((a, b) => b[1] - a[1])};
  }

  /** Puts nodes in the order of explain: those that fit, then the nearest. Nodes without a verdict come last. */
  sort(nodes) {
    const places = new Map([...this.nodes.keys()].map((name, place) => [name, place]));
    const place = (node) => places.get(node.name) ?? Infinity;
    return nodes.filter((node) => places.has(node.name)).sort((a, b) => place(a) - place(b));
  }
}

/**
 * A GPU has its own reason if that explains the node's, which is the one of filter. Otherwise the node's counts: a GPU may even have
 * room on a node that has too few of them.
 */
function combine(node, gpu) {
  const fits = node.fits && (gpu?.fits ?? true);
  if (fits) return {fits, reason: '', lacks: '', node};
  const reason = node.isExplained && gpu?.reason || node.reason;
  const lacks = gpu && !gpu.fits ? gpu.lacks ?? gpu.reason : node.detail ?? node.reason;
  return {fits, reason, lacks, node};
}

/** The memory that the nearest GPU lacks for a pod, by its explanation. */
export function missingMemory(explanation) {
  const lacks = (explanation?.verdicts?.[0]?.gpus ?? []).map((gpu) => Math.max(0, gpu.needed - gpu.free));
  return lacks.length ? Math.min(...lacks) : 0;
}
