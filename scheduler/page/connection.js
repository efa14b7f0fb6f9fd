// The connection to the read API: reads the state, follows its changes, and goes on after every break.
//
// EventSource cannot send a token, so that the stream of events is read with fetch.

/** Milliseconds without an event or comment after which the stream counts as lost; the server sends a comment every 15 s. */
const SILENCE = 40_000;
/** The longest time that an answer may take, in milliseconds: a large state over a slow port-forward takes long. */
const ANSWER_TIMEOUT = 60_000;
/** The longest pause between two tries, in milliseconds. */
const MAX_PAUSE = 10_000;

/** An answer that is no success. */
export class Refusal extends Error {
  constructor(status, text) {
    super(text || `HTTP ${status}`);
    this.status = status;
  }
}

export class Connection {
  /** `listener` has the functions state, changes and status; see `run`. */
  constructor(listener) {
    this.listener = listener;
    this.token = '';
    this.revision = null;
    this.wake = null;
  }

  /** Uses a token from now on; an empty one stands for none. */
  useToken(token) {
    this.token = token;
    this.wake?.();
  }

  /** The JSON at a path of the read API. */
  async get(path) {
    const abort = new AbortController();
    const timer = setTimeout(() => abort.abort(), ANSWER_TIMEOUT);
    try {
      const response = await this.request(path, abort.signal);
      return await response.json();
    } finally {
      clearTimeout(timer);
    }
  }

  async request(path, signal) {
    const headers = this.token ? {authorization: `Bearer ${this.token}`} : {};
    const response = await fetch(`/v1/${path}`, {headers, signal, cache: 'no-store', credentials: 'omit'});
    if (!response.ok) throw new Refusal(response.status, (await response.text()).trim());
    return response;
  }

  /**
   * Follows the state for as long as the page is open. Calls `state` with each whole state, `changes` with the events of each
   * revision, and `status` with the kind of the connection: "live", "lost", "token" or "refused", and a reason.
   */
  async run() {
    for (let failures = 0; ;) {
      const began = Date.now();
      try {
        if (!this.revision) {
          const state = await this.get('state');
          this.revision = state.revision;
          this.listener.state(state);
        }
        await this.follow();
      } catch (error) {
        this.report(error);
        const needsToken = error.status === 401 || error.status === 403;
        if (Date.now() - began > SILENCE) failures = 0;
        failures += 1;
        // Only a token helps; until one is entered, a try now and then notices if rights were given.
        await this.pause(needsToken ? 60_000 : Math.min(MAX_PAUSE, 500 * 2 ** failures));
        continue;
      }
      failures = 0;
    }
  }

  report(error) {
    if (error.status === 401 || error.status === 403) this.listener.status('token', error.message);
    else if (error instanceof Refusal) this.listener.status('refused', error.message);
    else this.listener.status('lost', 'the scheduler does not answer');
  }

  pause(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async follow() {
    const abort = new AbortController();
    let watchdog = setTimeout(() => abort.abort(), SILENCE);
    try {
      const response = await this.request(`changes?since=${this.revision}`, abort.signal);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      const events = new Events();
      for (;;) {
        const {value, done} = await reader.read();
        if (done) throw new Error('the stream has ended');
        clearTimeout(watchdog);
        watchdog = setTimeout(() => abort.abort(), SILENCE);
        for (const batch of events.take(value)) {
          if (batch.some(({name}) => name === 'reset')) {
            // Another process answers, or the break was too long.
            this.revision = null;
            return;
          }
          this.revision = batch.at(-1).id;
          this.listener.changes(batch);
        }
        this.listener.status('live');
      }
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }
}

/** Cuts a stream of server-sent events into batches. A revision is one batch, whose last event has an ID. */
class Events {
  constructor() {
    // Pieces of an event that has not ended; joined once, since a large event comes in thousands of pieces.
    this.pieces = [];
    this.batch = [];
  }

  take(text) {
    const batches = [];
    this.pieces.push(text);
    // The end of an event may be split between two pieces.
    if (!text.includes('\n')) return batches;
    const blocks = this.pieces.join('').split('\n\n');
    this.pieces = [blocks.pop()];
    for (const block of blocks) {
      const event = {};
      for (const line of block.split('\n')) {
        if (line.startsWith('event: ')) event.name = line.slice(7);
        else if (line.startsWith('data: ')) event.data = JSON.parse(line.slice(6));
        else if (line.startsWith('id: ')) event.id = line.slice(4);
      }
      if (!event.name) continue;
      this.batch.push(event);
      if (event.id) {
        batches.push(this.batch);
        this.batch = [];
      }
    }
    return batches;
  }
}
