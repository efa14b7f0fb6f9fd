// The page over made-up clusters: what people see, how fast it is, and what it does when something breaks.

import assert from 'node:assert/strict';
import {mkdirSync} from 'node:fs';
import {cpus, loadavg} from 'node:os';
import {after, before, test} from 'node:test';
import {LAPTOP, PHONE, breaches, durations, heap, launch, live, open, quantile, reasons, rows, until} from './browser.mjs';
import {MadeUp, serve} from './stand_in.mjs';

const SHOTS = process.env.SCREENSHOTS;
const FULL = {nodes: 40, fill: 1, trouble: 0, pending: 12};
const FRAGMENTED = {nodes: 60, fill: 0.6, seed: 3, trouble: 0.01, pending: 9, sizes: [7, 11, 13, 19, 38], typical: 10};
const LARGE = {nodes: 5000, fill: 0.75, seed: 4, trouble: 0.002, pending: 40};
const HUGE = {...LARGE, nodes: 15_000};

let browser;
before(async () => {
  browser = await launch();
  if (SHOTS) mkdirSync(SHOTS, {recursive: true});
});
after(() => browser.close());

/** Runs a check with a served cluster and a page of it. */
async function withPage(spec, options, check) {
  const server = await serve(new MadeUp(spec));
  let page;
  try {
    page = await open(browser, server.url + (options.hash ?? ''), options);
    await live(page);
    await check(page, server);
    assert.deepEqual(page.problems, []);
  } finally {
    await page?.close();
    await server.close();
  }
}

const headline = (page) => page.locator('#headline').innerText();
const table = (page) => page.locator('#table').innerText();

for (const [scheme, viewport, size] of [['light', LAPTOP, 'laptop'], ['dark', LAPTOP, 'laptop'], ['light', PHONE, 'phone'], ['dark', PHONE, 'phone']]) {
  for (const [name, spec] of Object.entries({full: FULL, empty: {nodes: 0}, fragmented: FRAGMENTED, large: LARGE})) {
    test(`axe finds nothing: ${name}, ${scheme}, ${size}`, async () => {
      await withPage(spec, {colorScheme: scheme, viewport}, async (page) => {
        for (const tab of ['cards', 'waiting', 'history', 'pods']) {
          await page.click(`#tab-${tab}`);
          await page.waitForTimeout(name === 'large' ? 1500 : 500);
          assert.deepEqual(await breaches(page), [], tab);
          const overflow = await page.evaluate(() => document.scrollingElement.scrollWidth - innerWidth);
          assert.ok(overflow <= 0, `${tab} is ${overflow} pixels wider than the window`);
          if (SHOTS) await page.screenshot({path: `${SHOTS}/${name}-${tab}-${scheme}-${size}.png`, fullPage: viewport === PHONE});
        }
      });
    });
  }
}

test('the headline says what is wrong', async () => {
  await withPage(FRAGMENTED, {}, async (page) => {
    await until(page, 'reasons', () => document.getElementById('headline').textContent.includes('not enough memory'));
    const text = await headline(page);
    assert.match(text, /\d+ of 480 GPUs are unhealthy/);
    assert.match(text, /9 pods wait for a GPU \(6: not enough memory free on any one GPU; 3: GPUs have room, see kubectl describe pod\)/);
    assert.match(text, /\d+ % of free memory is stranded: .* on which no typical pod fits/);
    await page.click('text=are unhealthy');
    assert.equal(await page.inputValue('#show'), 'trouble');
    const problems = (await rows(page, '#table')).filter((cells) => cells[4].includes('unhealthy, takes no new pods'));
    assert.equal(`${problems.length} of 480 GPUs are unhealthy.`, text.split('\n').find((line) => line.includes('unhealthy')));
  });
  await withPage({nodes: 3, trouble: 0}, {}, async (page, server) => {
    server.cluster.pending = Array.from({length: 9}, (_, n) => ({namespace: 'ml', name: `late-${n}`, uid: `late-${n}`, asked: `${90 + Math.min(n, 7)} GiB`, kind: Math.min(n, 7)}));
    server.send({pending: server.cluster.pending});
    await until(page, 'all', () => document.getElementById('headline').textContent.includes('9 pods wait for a GPU (7: not enough memory free on any one GPU; 2: other or unknown reasons).'));
  });
  await withPage({...FULL, pending: 0, fill: 0.5}, {}, async (page) => assert.match(await headline(page), /Nothing is wrong: 320 GPUs healthy, no pod waits/));
  await withPage({nodes: 0}, {}, async (page) => assert.match(await headline(page), /No node shares GPUs yet\. Label a node/));
});

test('memory of GPUs that take no pods is not free', async () => {
  await withPage({nodes: 3, gpus: 2, fill: 0, trouble: 0}, {}, async (page, server) => {
    const [sick, away] = [...server.cluster.nodes.values()];
    sick.gpus[0].healthy = false;
    away.plugin = 'its device plugin has not served kubelet for 4 minutes';
    server.send({nodes: [sick, away]});
    await until(page, 'the sums', () => document.getElementById('sums').textContent.includes('on GPUs that take no pods'));
    const {memory, unusable} = server.cluster.totals();
    const gib = (bytes) => bytes / 2 ** 30;
    assert.match(await page.locator('#sums').innerText(), new RegExp(`, ${gib(memory.total - unusable)} GiB free, nothing of it stranded, ${gib(unusable)} GiB on GPUs`));
    const free = (await rows(page, '#table')).map((cells) => [cells[0], cells[3].endsWith(' GiB, unusable')]);
    assert.deepEqual(free, [[away.name, true], [away.name, true], [sick.name, true], [sick.name, false], ['gpu-3', false], ['gpu-3', false]]);
    await page.click(`#table td:text-is("${sick.name}")`);
    assert.match(await page.locator('#details').innerText(), /\d+ GiB free cannot be used: the GPU is unhealthy/);
    await page.selectOption('#show', 'free');
    await until(page, 'two nodes', () => document.getElementById('sentence').textContent.startsWith('2 nodes of 3'));
  });
});

for (const [viewport, tabs] of [[LAPTOP, ['cards', 'waiting', 'history', 'pods']], [PHONE, ['cards', 'waiting']]]) test(`no table is wider than its place: ${viewport.width} pixels`, async () => {
  await withPage(FRAGMENTED, {viewport}, async (page) => {
    for (const tab of tabs) {
      await page.click(`#tab-${tab}`);
      await page.waitForTimeout(600);
      const cut = await page.evaluate(() => {
        const {scrollWidth, clientWidth} = document.querySelector('#table .scroller');
        return scrollWidth - clientWidth;
      });
      assert.ok(cut <= 0, `${tab}: ${cut} pixels of the table are cut off`);
    }
  });
});

test('names that are markup stay text', async () => {
  const names = (n) => `<img src=x onerror=alert(${n})><script>alert(1)</script>&amp;"'`;
  await withPage({nodes: 3, pending: 3, names}, {}, async (page) => {
    for (const tab of ['cards', 'waiting', 'pods']) {
      await page.click(`#tab-${tab}`);
      await page.waitForTimeout(600);
      assert.match(await page.locator('#view').innerText(), /<img src=x onerror=alert\(/, tab);
    }
    assert.equal(await page.locator('#view img, #view script').count(), 0);
  });
});

test('the search and the choices show the nodes that match', async () => {
  await withPage({...LARGE, nodes: 300}, {}, async (page, {cluster}) => {
    await page.fill('#search', 'gpu-017 ');
    await until(page, 'one node', () => document.getElementById('sentence').textContent.startsWith('1 node of 300'));
    const [node] = [...cluster.nodes.values()].filter(({name}) => name === 'gpu-017');
    assert.deepEqual((await rows(page, '#table')).map((cells) => cells[1]), node.gpus.map((gpu) => String(gpu.minor)));
    const {name} = node.gpus.flatMap((gpu) => gpu.holders)[0];
    await page.fill('#search', name);
    await until(page, 'the pod', (name) => document.querySelector('#table').textContent.includes(name), name);
    await page.fill('#search', '');
    await page.selectOption('#show', 'stranded');
    const stranded = [...cluster.nodes.values()].filter((node) => node.gpus.some((gpu) => gpu.stranded)).length;
    await until(page, 'stranded', (n) => document.getElementById('sentence').textContent.startsWith(`${n} node`), stranded);
  });
});

test('the keyboard reaches everything', async () => {
  await withPage(FULL, {}, async (page) => {
    await page.focus('#tab-cards');
    await page.keyboard.press('ArrowRight');
    assert.equal(await page.getAttribute('#tab-waiting', 'aria-selected'), 'true');
    await page.keyboard.press('ArrowLeft');
    await page.focus('#map');
    for (const key of ['ArrowDown', 'ArrowDown', 'ArrowRight']) await page.keyboard.press(key);
    const details = () => page.locator('#details h2').innerText();
    assert.equal(await details(), 'gpu-02, GPU 1');
    await page.keyboard.press('ArrowUp');
    assert.equal(await details(), 'gpu-02, GPU 0');
    await page.keyboard.press('End');
    assert.equal(await details(), 'gpu-40, GPU 0');
    await page.waitForTimeout(100);
    assert.equal(await page.locator('#table tr.picked').innerText().then((text) => text.split('\t').slice(0, 2).join()), 'gpu-40,0');
    await page.keyboard.press('+');
    await page.keyboard.press('Escape');
    assert.match(await page.locator('#details').innerText(), /Point at a GPU/);
    await page.focus('#table .scroller');
    await page.keyboard.press('ArrowDown');
    assert.equal(await details(), 'gpu-40, GPU 1');
    await page.click('#tab-history');
    await page.waitForTimeout(300);
    await page.focus('#history-chart');
    await page.keyboard.press('ArrowLeft');
    assert.match(await page.locator('#details').innerText(), /allocated \(\d+ %\)/);
  });
});

test('a click on a bar selects its GPU, in the table too', async () => {
  await withPage({nodes: 3, gpus: 4, trouble: 0}, {}, async (page) => {
    const box = await page.locator('#map').boundingBox();
    await page.mouse.click(box.x + 120, box.y + 60);
    assert.match(await page.locator('#details h2').innerText(), /^gpu-1, GPU 0$/);
    assert.equal(await page.locator('#table tr.picked').count(), 1);
  });
});

test('changes arrive: pods, nodes that come and go, pods that wait', async () => {
  await withPage({nodes: 4, gpus: 2, fill: 0, trouble: 0}, {}, async (page, server) => {
    const node = server.cluster.nodes.get('gpu-2');
    server.cluster.add(node.gpus[1]);
    server.send({nodes: [node]});
    await until(page, 'the pod', () => document.getElementById('table').textContent.includes('train-1'));
    const another = {...node, name: 'gpu-20'};
    server.cluster.nodes.set('gpu-20', another);
    server.cluster.nodes.delete('gpu-1');
    server.send({nodes: [another], removed: ['gpu-1']});
    await until(page, 'the node', () => [...document.querySelectorAll('#table td')].some((cell) => cell.textContent === 'gpu-20'));
    assert.deepEqual([...new Set((await rows(page, '#table')).map((cells) => cells[0]))], ['gpu-2', 'gpu-3', 'gpu-4', 'gpu-20']);
    server.cluster.pending = [{namespace: 'ml', name: 'late', uid: 'late', asked: '60 GiB', kind: 1}];
    server.send({pending: server.cluster.pending});
    await until(page, 'the wait', () => document.getElementById('headline').textContent.includes('1 pod waits'));
  });
});

test('the verdicts of the page are those of explain', async () => {
  await withPage(FRAGMENTED, {hash: '#waiting/ml/train-waits-1'}, async (page, {cluster}) => {
    await until(page, 'verdicts', () => document.querySelector('#table tbody tr'));
    const explained = cluster.explain('ml', 'train-waits-1');
    const expected = explained.verdicts.flatMap(reasons);
    const shown = (await rows(page, '#table')).map(([node, minor, , , reason]) => [node, minor, reason]);
    assert.deepEqual(shown, expected);
  });
});

test('the view of waiting pods opens on one that GPUs block', async () => {
  for (const hash of ['', '#waiting']) {
    await withPage(FRAGMENTED, {hash}, async (page) => {
      if (!hash) {
        await until(page, 'reasons', () => document.getElementById('headline').textContent.includes('GPUs have room'));
        await page.click('text=9 pods wait');
      }
      await until(page, 'a pod', () => document.querySelector('#pending tr.picked'));
      const listed = await rows(page, '#pending');
      assert.equal(await page.locator('#pending tr.picked td').first().innerText(), 'ml/train-waits-1');
      assert.deepEqual(listed[0], ['ml/train-waits-0', '20 GiB, 50 % core, over 2 GPUs', 'GPUs have room, see kubectl describe pod']);
      assert.deepEqual(listed[1], ['ml/train-waits-1', '60 GiB', 'not enough memory free on any one GPU']);
      assert.match(await page.locator('#sentence').innerText(), /^ml\/train-waits-1 asks for 60 GiB/);
    });
  }
});

test('the address keeps the view: sorting, namespace, search, the selected GPU', async () => {
  await withPage({nodes: 9, gpus: 1, fill: 0.3, trouble: 0}, {}, async (page, server) => {
    await page.focus('#table th:has-text("Free") button');
    await page.keyboard.press('Enter');
    assert.equal(await page.getAttribute('#table th:has-text("Free")', 'aria-sort'), 'descending');
    await page.waitForTimeout(100);
    const free = (cells) => Number(cells[3].split(' ')[0]);
    const sorted = await rows(page, '#table');
    assert.deepEqual(sorted.map(free), sorted.map(free).sort((a, b) => b - a));
    await page.selectOption('#namespace', 'vision');
    await page.fill('#search', 'gpu-');
    await page.click('#table tbody tr[data-at="1"] td');
    await page.waitForTimeout(300);
    const [picked, shown] = [await page.locator('#details h2').innerText(), await rows(page, '#table')];
    const ofVision = new Set([...server.cluster.nodes.values()].filter((node) => node.gpus.some((gpu) => gpu.holders.some((holder) => holder.namespace === 'vision'))).map(({name}) => name));
    assert.ok(ofVision.size > 1 && ofVision.size < 9);
    assert.deepEqual(new Set(shown.map(([node]) => node)), ofVision);
    const other = await open(browser, page.url());
    await live(other);
    await until(other, 'the selected GPU', (picked) => document.querySelector('#details h2')?.textContent === picked, picked);
    assert.deepEqual(await rows(other, '#table'), shown);
    assert.deepEqual([await other.inputValue('#namespace'), await other.inputValue('#search')], ['vision', 'gpu-']);
    await other.click('#tab-pods');
    await other.waitForTimeout(100);
    assert.ok((await rows(other, '#table')).every(([pod]) => pod.startsWith('vision/')));
    assert.deepEqual(other.problems, []);
    await other.close();
  });
});

test('the name of a pod is copied, without the clipboard of browsers too', async () => {
  await withPage({nodes: 1, gpus: 1, trouble: 0}, {hash: '#pods'}, async (page) => {
    await until(page, 'pods', () => document.querySelector('.copy'));
    const name = await page.locator('#table tr:not(.spacer) td').first().innerText();
    for (const hasClipboard of [true, false]) {
      const copied = page.evaluate((hasClipboard) => new Promise((resolve) => {
        const writeText = hasClipboard ? async (text) => resolve(text) : () => Promise.reject(new Error('not here'));
        Object.defineProperty(navigator, 'clipboard', {value: {writeText}, configurable: true});
        document.addEventListener('copy', () => resolve(document.activeElement.value), {once: true});
      }), hasClipboard);
      await page.locator('.copy').first().click();
      assert.equal(await copied, name);
    }
    assert.equal(await page.locator('#copied').textContent(), `${name} is copied.`);
  });
});

test('a pod that uses more than its share is marked', async () => {
  await withPage({nodes: 1, gpus: 1, trouble: 0, over: 1}, {hash: '#pods'}, async (page, server) => {
    await until(page, 'the use', () => document.querySelector('#table td .bad'));
    const [{memory, used}] = [...server.cluster.nodes.values()][0].gpus[0].holders;
    const marks = await page.locator('#table td .bad').allInnerTexts();
    assert.deepEqual(marks, [`${used / 2 ** 30} GiB (over ${memory / 2 ** 30} GiB)`]);
  });
});

test('namespaces have colours and names in the legend', async () => {
  await withPage({nodes: 3, trouble: 0}, {}, async (page) => {
    const legend = await page.locator('#legend').innerText();
    for (const namespace of ['ml', 'search', 'vision']) assert.ok(legend.includes(`pods of ${namespace}`), legend);
    const colours = await page.evaluate(() => [...document.querySelectorAll('#legend canvas')].slice(0, 3)
      .map((swatch) => swatch.getContext('2d').getImageData(8, 8, 1, 1).data.join()));
    assert.equal(new Set(colours).size, 3);
  });
});

test('reasons are wrapped and not cut', async () => {
  for (const viewport of [LAPTOP, PHONE]) await withPage({nodes: 4, trouble: 0, pending: 3}, {viewport, hash: '#waiting/ml/train-waits-1'}, async (page) => {
    await until(page, 'verdicts', () => document.querySelector('#table tbody td.rest'));
    const cut = await page.evaluate(() => [...document.querySelectorAll('td.rest')]
      .filter((cell) => cell.scrollWidth > cell.clientWidth || cell.scrollHeight > cell.clientHeight + 1).map((cell) => cell.textContent));
    assert.deepEqual(cut, []);
  });
});

test('the chart begins where the data begins', async () => {
  const cluster = new MadeUp({nodes: 3, trouble: 0});
  const history = cluster.history(30);
  for (const point of history.points.slice(0, 10)) point.models = {};
  cluster.history = () => history;
  const server = await serve(cluster);
  const page = await open(browser, `${server.url}#history`);
  await live(page);
  await until(page, 'points', () => document.querySelector('#table tbody td'));
  assert.equal((await rows(page, '#table')).length, 20);
  // The first pixels beside the axis have the colour of allocated memory, and not that of the paper.
  await page.focus('#history-chart');
  await page.keyboard.press('Home');
  const left = await page.evaluate(() => {
    const canvas = document.getElementById('history-canvas');
    const ratio = devicePixelRatio;
    const at = (x) => canvas.getContext('2d').getImageData(x * ratio, (canvas.clientHeight - 110) * ratio, 1, 1).data.join();
    return [at(90), at(2)];
  });
  assert.notEqual(left[0], left[1]);
  await page.close();
  await server.close();
});

test('the scheduler goes away and comes back', async () => {
  await withPage(FULL, {}, async (page, server) => {
    server.away();
    await until(page, 'lost', () => /Trying again: the scheduler does not answer\. The picture is that of \d\d:\d\d:\d\d\./.test(document.getElementById('connection').textContent));
    assert.match(await table(page), /gpu-01/, 'the last picture stays');
    server.requests.length = 0;
    server.back();
    await live(page);
    assert.ok(!server.requests.includes('/v1/state'), 'the page goes on from its revision');
  });
});

test('another replica answers after a change of the leader', async () => {
  await withPage({nodes: 3, trouble: 0}, {}, async (page, server) => {
    server.away();
    await until(page, 'lost', () => document.body.classList.contains('stale'));
    server.cluster = Object.assign(new MadeUp({nodes: 5, seed: 9, trouble: 0}), {leading: false});
    server.back();
    await until(page, 'standby', () => document.getElementById('connection').textContent.includes('this replica stands by, another leads'));
    await until(page, 'its state', () => document.getElementById('sums').textContent.startsWith('40 GPUs on 5 nodes'));
  });
});

test('a token is asked for, kept nowhere, and asked for again when it ends', async () => {
  const server = await serve(new MadeUp(FULL));
  server.token = 'first';
  const page = await open(browser, server.url);
  await until(page, 'the field', () => !document.getElementById('token').hidden);
  assert.deepEqual(await breaches(page), []);
  await page.fill('#token-field', 'wrong');
  await page.keyboard.press('Enter');
  await until(page, 'a refusal', () => document.getElementById('connection').textContent.includes('is refused or has ended: the token is not known'));
  await page.fill('#token-field', 'first');
  await page.keyboard.press('Enter');
  await live(page);
  assert.equal(await page.isVisible('#token'), false);
  const kept = await page.evaluate(() => JSON.stringify([Object.entries(localStorage), Object.entries(sessionStorage), document.cookie, location.href]));
  assert.ok(!kept.includes('first'), kept);
  server.token = 'second';
  server.away();
  server.back();
  await until(page, 'the field again', () => !document.getElementById('token').hidden);
  assert.match(await page.locator('#connection').innerText(), /The picture is that of/);
  await page.fill('#token-field', 'second');
  await page.keyboard.press('Enter');
  await live(page);
  assert.deepEqual(page.problems, []);
  await page.close();
  await server.close();
});

test('without the right to list pods there are no names', async () => {
  const cluster = new MadeUp({nodes: 3, trouble: 0});
  for (const node of cluster.nodes.values()) for (const gpu of node.gpus) for (const holder of gpu.holders) delete holder.name, delete holder.namespace;
  cluster.namesHidden = true;
  const server = await serve(cluster);
  const page = await open(browser, server.url);
  await live(page);
  assert.match(await page.locator('#sentence').innerText(), /Names of pods that your token may not list are hidden/);
  assert.match(await table(page), /pod u-1/);
  await page.close();
  await server.close();
});

test('5,000 nodes of 8 GPUs: first picture, panning and changes', async (t) => {
  await withPage(LARGE, {}, async (page, server) => {
    const [first] = await page.evaluate(() => {
      const entries = performance.getEntriesByType('measure');
      const state = entries.find((entry) => entry.name === 'state');
      const map = entries.find((entry) => entry.name === 'map' && entry.startTime >= state.startTime);
      return [map.startTime + map.duration - state.startTime];
    });
    t.diagnostic(`first picture ${first.toFixed(0)} ms after the data is there`);
    assert.ok(first < 1000);
    await durations(page, 'map');
    const frames = await pan(page);
    const draws = await durations(page, 'map');
    t.diagnostic(`panning: median ${(1000 / quantile(frames, 0.5)).toFixed(0)} frames/s, 95 % of frames within ${quantile(frames, 0.95).toFixed(1)} ms; `
      + `of it drawing: median ${quantile(draws, 0.5).toFixed(1)} ms, 95 % within ${quantile(draws, 0.95).toFixed(1)} ms; load of the machine ${loadavg()[0].toFixed(1)}`);
    assert.ok(quantile(frames, 0.5) < 17.5 && quantile(draws, 0.95) < 8, 'frames take longer than at 60 a second');
    await durations(page, 'delta');
    for (let n = 0; n < 200; n += 1) {
      server.send({nodes: Array.from({length: 10}, () => server.cluster.change())});
      await page.waitForTimeout(20);
    }
    await page.waitForTimeout(500);
    const [deltas, drawn] = [await durations(page, 'delta'), await durations(page, 'map')];
    t.diagnostic(`${deltas.length} changes of 10 nodes: median ${quantile(deltas, 0.5).toFixed(1)} ms, 99 % within ${quantile(deltas, 0.99).toFixed(1)} ms; drawing 99 % within ${quantile(drawn, 0.99).toFixed(1)} ms`);
    // On a machine with much other work, some changes wait for a core; then only 95 of 100 have to be fast.
    const part = loadavg()[0] > 2 * cpus().length ? 0.95 : 0.99;
    assert.ok(deltas.length >= 190 && quantile(deltas, part) + quantile(drawn, part) < 20);
  });
});

/** Scrolls the map for two seconds; returns the milliseconds between frames. */
function pan(page) {
  return page.evaluate(() => new Promise((resolve) => {
    const map = document.getElementById('map');
    const frames = [];
    let last;
    const step = (now) => {
      if (last !== undefined) frames.push(now - last);
      last = now;
      map.scrollTop += 24;
      if (map.scrollTop + map.clientHeight >= map.scrollHeight) map.scrollTop = 0;
      if (frames.length < 120) requestAnimationFrame(step);
      else resolve(frames);
    };
    requestAnimationFrame(step);
  }));
}

test('the map says which of the nodes it shows', async () => {
  await withPage(LARGE, {}, async (page) => {
    await until(page, 'the nodes', () => /^Nodes 1 to \d{3} of 5,000, problems first; scroll for more$/.test(document.getElementById('map-window').textContent));
    await page.evaluate(() => document.getElementById('map').scrollTo(0, 1e6));
    await until(page, 'the last ones', () => /^Nodes 4,\d{3} to 5,000 of 5,000, /.test(document.getElementById('map-window').textContent));
    await page.selectOption('#order', 'name');
    await until(page, 'by name', () => document.getElementById('map-window').textContent.includes('5,000, by name;'));
  });
  await withPage(FULL, {}, (page) => until(page, 'all', () => document.getElementById('map-window').textContent === '40 nodes'));
});

test('15,000 nodes of 8 GPUs are usable', async (t) => {
  await withPage(HUGE, {}, async (page, server) => {
    const [state] = await durations(page, 'state');
    await durations(page, 'map');
    const frames = await pan(page);
    const draws = await durations(page, 'map');
    await durations(page, 'delta');
    for (let n = 0; n < 30; n += 1) {
      server.send({nodes: [server.cluster.change()]});
      await page.waitForTimeout(50);
    }
    const deltas = await durations(page, 'delta');
    t.diagnostic(`state taken in ${state.toFixed(0)} ms; panning: median ${(1000 / quantile(frames, 0.5)).toFixed(0)} frames/s, drawing 95 % within ${quantile(draws, 0.95).toFixed(1)} ms; changes within ${Math.max(...deltas).toFixed(1)} ms; heap ${((await heap(page)) / 1e6).toFixed(0)} MB`);
    assert.ok(state < 1500 && quantile(frames, 0.5) < 34 && quantile(draws, 0.95) < 16);
    await page.fill('#search', 'gpu-14999');
    await until(page, 'the search', () => document.getElementById('sentence').textContent.startsWith('1 node of 15,000'));
  });
});

test('memory stays flat over many events', async (t) => {
  await withPage({...LARGE, nodes: 500}, {}, async (page, server) => {
    const send = async (n) => {
      for (let at = 0; at < n; at += 1) {
        server.send({nodes: [server.cluster.change(), server.cluster.change()], pending: server.cluster.pending});
        if (at % 100 === 0) await page.waitForTimeout(30);
      }
      await page.waitForTimeout(1000);
      return heap(page);
    };
    const first = await send(1000);
    const elements = await page.evaluate(() => document.querySelectorAll('*').length);
    const last = await send(5000);
    t.diagnostic(`heap ${(first / 1e6).toFixed(1)} MB after 1,000 revisions, ${(last / 1e6).toFixed(1)} MB after 6,000`);
    assert.ok(last < first * 1.1 + 500_000);
    assert.ok(await page.evaluate(() => document.querySelectorAll('*').length) < elements + 50);
  });
});
