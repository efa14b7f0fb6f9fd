// The page of the real scheduler, beside the real API, the real command and the real filter, in the testbed's demo cluster.
//
// .ci/page starts the cluster and names it in the environment: PAGE, KUBECONFIG, DEMO (the process) and CLI.

import assert from 'node:assert/strict';
import {execFileSync} from 'node:child_process';
import {readFileSync, readdirSync} from 'node:fs';
import {after, before, test} from 'node:test';
import {breaches, launch, live, open, reasons, rows, until} from './browser.mjs';
import {MadeUp, POLICY} from './stand_in.mjs';

const {PAGE, KUBECONFIG, DEMO, CLI, SCREENSHOTS} = process.env;
const API = PAGE && readFileSync(KUBECONFIG, 'utf8').match(/"?server"?: "?(http[^"\s]+)/)[1];
const PODS = `${API}/api/v1/namespaces/default/pods`;
const GIB = 'Gi';

let browser;
before(async () => browser = await launch());
after(() => browser.close());

async function call(method, url, body) {
  const answer = await fetch(url, {method, body: body && JSON.stringify(body), headers: {'content-type': 'application/json'}});
  const text = await answer.text();
  assert.ok(answer.ok, `${method} ${url}: ${answer.status} ${text}`);
  return JSON.parse(text);
}

function create(name, amounts, rules = {}) {
  const resources = {limits: amounts, requests: amounts};
  return call('POST', PODS, {metadata: {name, namespace: 'default'}, spec: {...rules, containers: [{name: 'main', image: 'none', resources}]}});
}

function share(gpus, memory) {
  return {'koordinator.sh/gpu.shared': String(gpus), 'koordinator.sh/gpu-memory': `${memory}${GIB}`};
}

/** The scheduler's process, a child of the demo, and the value of one of its flags. */
function scheduler(flag) {
  for (const pid of readdirSync('/proc').filter((name) => /^\d+$/.test(name))) {
    try {
      const parent = readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ')[1].split(' ')[1];
      const args = readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0');
      if (parent === DEMO && args[0].endsWith('gpushare-scheduler')) return {pid: Number(pid), value: args[args.indexOf(flag) + 1]};
    } catch {
      // The process has ended meanwhile.
    }
  }
  throw new Error('no scheduler runs');
}

test('the listener answers with the policy, and only to localhost', async () => {
  const answer = await fetch(PAGE);
  assert.equal(answer.headers.get('content-security-policy'), POLICY);
  assert.equal(answer.headers.get('referrer-policy'), 'no-referrer');
});

test('made-up clusters have the fields of the real scheduler', async () => {
  const names = (value) => Object.keys(value ?? {});
  const real = await call('GET', `${PAGE}v1/state`);
  const made = new MadeUp({nodes: 3, pending: 1}).state();
  assert.deepEqual(names(made).filter((name) => !(name in real)), []);
  const gpus = real.nodes.flatMap((node) => node.gpus);
  const optional = ['stranded', 'used', 'plugin', 'core'];
  const known = (objects) => new Set([...objects.flatMap(names), ...optional]);
  const all = made.nodes.flatMap((node) => node.gpus);
  assert.deepEqual(made.nodes.flatMap(names).filter((name) => !known(real.nodes).has(name)), []);
  assert.deepEqual(all.flatMap(names).filter((name) => !known(gpus).has(name)), []);
  const holders = (gpus) => gpus.flatMap((gpu) => gpu.holders ?? []);
  assert.deepEqual(holders(all).flatMap(names).filter((name) => !known(holders(gpus)).has(name)), []);
  assert.deepEqual(names(made.pending[0]).sort(), names(real.pending[0]).sort());
  assert.deepEqual(names(made.totals).sort(), names(real.totals).filter((name) => name !== 'used').sort());
});

test('the table of the cards is the state, and pods come and go', async () => {
  const page = await open(browser, PAGE);
  await live(page);
  await create('page-comes', share(1, 2));
  await until(page, 'the pod', () => document.getElementById('table').textContent.includes('default/page-comes'));
  const state = await call('GET', `${PAGE}v1/state`);
  const expected = state.nodes.flatMap((node) => node.gpus.map((gpu) => [
    node.name, String(gpu.minor), (gpu.holders ?? []).map((holder) => `${holder.namespace}/${holder.name}`).join(', '),
  ]));
  assert.deepEqual((await rows(page, '#table')).map((cells) => [cells[0], cells[1], cells[4]]), expected);
  assert.deepEqual(await breaches(page), []);
  if (SCREENSHOTS) await page.screenshot({path: `${SCREENSHOTS}/demo.png`});
  await call('DELETE', `${PODS}/page-comes`);
  await until(page, 'its end', () => !document.getElementById('table').textContent.includes('default/page-comes'));
  assert.deepEqual(page.problems, []);
  await page.close();
});

test('pods that ask for the same by other rules have reasons of their own', async () => {
  await create('page-plain', share(3, 99));
  await create('page-chosen', share(3, 99), {nodeSelector: {'gpu-type': 'none'}});
  await create('page-gated', share(3, 3), {schedulingGates: [{name: 'example.com/quota'}]});
  const page = await open(browser, `${PAGE}#waiting`);
  await live(page);
  await until(page, 'the reasons', () => {
    const [, ...found] = [...document.querySelectorAll('#pending tr')].map((row) => row.textContent);
    const has = (name, reason) => found.some((text) => text.includes(name) && text.includes(reason));
    return has('page-plain', 'Insufficient koordinator.sh/gpu-memory') && has('page-chosen', 'node affinity/selector')
      && has('page-gated', 'scheduling gates');
  });
  await page.close();
  for (const name of ['page-plain', 'page-chosen', 'page-gated']) await call('DELETE', `${PODS}/${name}`);
});

test('the colours of a waiting pod are the reasons of explain and of filter', async () => {
  // Each GPU of n1 and n2 is too small for the first; the second wants two GPUs, of which no node has enough.
  for (const [name, gpus, memory] of [['page-big', 1, 22], ['page-pair', 4, 60]]) {
    // The pod fills the one large GPU, if it is free, so that the next of its kind waits.
    const made = await create(name, share(gpus, memory));
    let waiting = made;
    for (let tries = 0; ; tries += 1) {
      const {pending} = await call('GET', `${PAGE}v1/state`);
      if (pending.some((pod) => pod.name === waiting.metadata.name)) break;
      assert.ok(tries < 40, `${name} does not wait`);
      if (tries % 10 === 9) waiting = await create(`${name}-${tries}`, share(gpus, memory));
      await new Promise((resolve) => setTimeout(resolve, 300));
    }
    const pod = waiting.metadata.name;
    const page = await open(browser, `${PAGE}#waiting/default/${pod}`);
    await live(page);
    await until(page, 'verdicts', () => document.querySelector('#table tbody tr'));
    const shown = await rows(page, '#table');
    if (SCREENSHOTS) await page.screenshot({path: `${SCREENSHOTS}/demo-${name}.png`});

    // explain leaves with 2, as no node has room.
    let text;
    try {
      text = execFileSync(CLI, ['explain', '--all', '-o', 'json', '--read-api', new URL(PAGE).host, `default/${pod}`], {env: {KUBECONFIG}, encoding: 'utf8'});
    } catch (error) {
      assert.equal(error.status, 2, error.stderr);
      text = error.stdout;
    }
    const explained = JSON.parse(text);
    // A node that kube-scheduler refuses before it asks filter has that reason, and no verdicts of GPUs.
    const asked = explained.verdicts.filter(({gpus, reason}) => gpus && !reason?.startsWith('Insufficient '));
    const expected = asked.flatMap(reasons);
    const isAsked = ([node]) => asked.some((verdict) => verdict.node === node);
    assert.deepEqual(new Set(shown.filter(isAsked).map(([node, minor, , , reason]) => [node, minor, reason].join())), new Set(expected.map((cells) => cells.join())));

    const filter = `http://${scheduler('--listen').value}/gpushare-scheduler/filter`;
    const nodes = asked.map(({node}) => node);
    const answer = await call('POST', filter, {Pod: await call('GET', `${PODS}/${pod}`), Nodes: null, NodeNames: nodes});
    const refused = {...answer.FailedNodes, ...answer.FailedAndUnresolvableNodes};
    for (const node of nodes) {
      // The text may have a suffix that changes, so that kube-scheduler tries again.
      const {reason} = explained.verdicts.find((verdict) => verdict.node === node);
      assert.ok(refused[node]?.startsWith(reason), `${node}: filter says ${refused[node]}, explain ${reason}`);
      // A GPU of a node may have another reason than the node; at least one has its reason.
      assert.ok(shown.some((cells) => cells[0] === node && cells[4] === reason), `${node}: ${reason} is in no row`);
    }
    const legend = await page.locator('#legend').innerText();
    for (const [reason, n] of Object.entries(Object.groupBy?.(shown.filter(isAsked), (cells) => cells[4]) ?? {})) {
      if (reason) assert.ok(legend.includes(`${reason} (${n.length})`), legend);
    }
    assert.deepEqual(page.problems, []);
    await page.close();
  }
});

test('a scheduler that hangs, and goes on', async () => {
  const page = await open(browser, PAGE);
  await live(page);
  const {pid} = scheduler('--listen');
  process.kill(pid, 'SIGSTOP');
  try {
    await until(page, 'stale', () => document.body.classList.contains('stale'), null, 70_000);
    assert.match(await page.locator('#connection').innerText(), /Trying again: .* The picture is that of \d\d:\d\d:\d\d/);
    assert.match(await page.locator('#table').innerText(), /n1/);
  } finally {
    process.kill(pid, 'SIGCONT');
  }
  await until(page, 'live', () => document.getElementById('connection').textContent.startsWith('live'), null, 40_000);
  await page.close();
});
