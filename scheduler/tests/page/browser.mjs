// A real Chromium without a window, and what the tests ask a page.

import {mkdtempSync, readFileSync, rmSync} from 'node:fs';
import {tmpdir} from 'node:os';
import {join} from 'node:path';
import {createRequire} from 'node:module';
import {chromium} from 'playwright-core';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const FLAGS = [
  '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update',
  '--disable-sync',
];
export const LAPTOP = {width: 1400, height: 900};
export const PHONE = {width: 390, height: 800};

/** Starts a browser with a profile of its own; `close` removes it. */
export async function launch() {
  const profile = mkdtempSync(join(tmpdir(), 'gpushare-page-'));
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, args: FLAGS, viewport: LAPTOP,
  });
  return {
    context,
    async close() {
      await context.close();
      rmSync(profile, {recursive: true, force: true});
    },
  };
}

/** Opens an address; `problems` collects errors, breaches of the policy and requests to other hosts. */
export async function open(browser, url, {viewport = LAPTOP, colorScheme = 'light'} = {}) {
  const page = await browser.context.newPage();
  await page.setViewportSize(viewport);
  await page.emulateMedia({colorScheme});
  page.problems = [];
  page.on('pageerror', (error) => page.problems.push(String(error.stack)));
  page.on('console', (message) => {
    // The browser reports each failed request; those that a test provokes are checked by their effect.
    if (message.type() === 'error' && !message.text().startsWith('Failed to load resource')) page.problems.push(message.text());
  });
  page.on('dialog', (dialog) => {
    page.problems.push(`dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  page.on('request', (request) => {
    if (new URL(request.url()).host !== new URL(url).host) page.problems.push(`request to ${request.url()}`);
  });
  await page.goto(url);
  return page;
}

export async function until(page, what, condition, argument, timeout = 20_000) {
  try {
    await page.waitForFunction(condition, argument, {timeout, polling: 50});
  } catch {
    const text = await page.evaluate(() => document.body.innerText.slice(0, 2000));
    throw new Error(`${what}: not in ${timeout} ms; the page shows:\n${text}`);
  }
}

export function live(page) {
  return until(page, 'live', () => document.getElementById('connection').textContent.startsWith('live'));
}

/** The breaches that axe finds, each with the elements. */
export async function breaches(page) {
  // The policy of the page forbids script elements of others; the debugger's evaluation is none.
  await page.evaluate(AXE);
  const {violations} = await page.evaluate(() => globalThis.axe.run(document, {resultTypes: ['violations']}));
  return violations.map(({id, nodes}) => `${id}: ${nodes.map((node) => node.html.slice(0, 160)).join(' | ')}`);
}

/** The texts of all rows of a table: the table has only those in the window, so it is scrolled through. */
export async function rows(page, host) {
  return page.evaluate(async (host) => {
    const scroller = document.querySelector(`${host} .scroller`);
    const found = new Map();
    const frame = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    for (let top = 0; ; top += scroller.clientHeight / 2) {
      scroller.scrollTop = top;
      await frame();
      for (const line of scroller.querySelectorAll('tbody tr:not(.spacer)')) {
        found.set(Number(line.getAttribute('aria-rowindex')), [...line.cells].map((cell) => cell.textContent));
      }
      if (top + scroller.clientHeight >= scroller.scrollHeight) break;
    }
    scroller.scrollTop = 0;
    return [...found].sort((a, b) => a[0] - b[0]).map(([, cells]) => cells);
  }, host);
}

/**
 * The rows that the page has to show for the verdict of a node: node, GPU, reason. The reason of a refused node, which filter gives,
 * is that of its GPUs too, unless one of them has the same: then each has its own.
 */
export function reasons({node, fits, reason = '', gpus}) {
  const isExplained = gpus.some((gpu) => gpu.reason === reason);
  return gpus.map((gpu) => {
    const refusal = isExplained && gpu.reason ? gpu.reason : reason;
    return [node, String(gpu.minor), fits && gpu.fits ? '' : refusal || gpu.reason];
  });
}

/** Bytes of the script heap after a collection. */
export async function heap(page) {
  const session = await page.context().newCDPSession(page);
  await session.send('HeapProfiler.collectGarbage');
  const {usedSize} = await session.send('Runtime.getHeapUsage');
  await session.detach();
  return usedSize;
}

/** Durations in milliseconds of what the page measures itself: "state", "delta", "map". */
export async function durations(page, name) {
  return page.evaluate((name) => {
    const found = performance.getEntriesByName(name, 'measure').map((entry) => entry.duration);
    performance.clearMeasures(name);
    return found;
  }, name);
}

export function quantile(values, part) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * part))] ?? NaN;
}
