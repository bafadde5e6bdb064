// Gets documents from the server, or in a report, from the data in its HTML file.

import { withoutEscapes } from './dom.js';

const embedded = document.getElementById('report');
export const report = embedded ? JSON.parse(embedded.textContent) : null;

export class Failure extends Error {
  constructor({ message, hint }) {
    super(message);
    this.hint = hint;
  }
}

export async function get(path, params = {}) {
  if (report) return fromReport(path, params);
  return request(`${path}?${new URLSearchParams(Object.entries(params).filter(([, value]) => value != null && value !== ''))}`);
}

export const post = (path) => request(path, { method: 'POST' });

async function request(path, options) {
  let response;
  try {
    response = await fetch(`/api/${path}`, options);
  } catch {
    throw new Failure({ message: 'The server does not respond.', hint: 'run `distflow ui` again, and open its new URL' });
  }
  const text = await response.text();
  if (!response.headers.get('content-type')?.includes('json')) throw new Failure({ message: text.trim() });
  const found = JSON.parse(text);
  if (found.error && !response.ok) throw new Failure(found.error);
  return found;
}

// Calls a function after changes of a workflow, or of the list, at most about once a second. Returns a function to stop.
export function onChange(workflow, call) {
  if (report) return () => {};
  const stream = new EventSource(`/api/changes${workflow ? `?workflow=${encodeURIComponent(workflow)}` : ''}`);
  let timer = null,
    isFirst = true;
  stream.onmessage = () => {
    if (isFirst) {
      isFirst = false;
      return;
    }
    timer ??= setTimeout(
      () => {
        timer = null;
        call();
      },
      document.hidden ? 5000 : 700,
    );
  };
  stream.onerror = () => document.body.classList.add('offline');
  stream.onopen = () => {
    if (document.body.classList.replace('offline', 'online')) call();
  };
  return () => {
    stream.close();
    clearTimeout(timer);
  };
}

function fromReport(path, params) {
  const part = path.split('/').pop();
  if (part === 'about') return report.about;
  if (part === 'logs' || part === 'search') return reportLines(part, params);
  const found = report.parts[part];
  if (!found) throw new Failure({ message: `This report has no ${part}.` });
  if (found.error) throw new Failure(found.error);
  return found;
}

let views = new Map();
function reportLines(part, { first = 0, count = 200, task, rank, text }) {
  const { sources, lines } = report.logs;
  const wanted = (origin) =>
    (!task || sources[origin].task === task) && (rank == null || rank === '' || sources[origin].rank === Number(rank));
  const key = `${task ?? ''} ${rank ?? ''}`;
  if (!views.has(key))
    views.set(
      key,
      lines.filter(([origin]) => wanted(origin)),
    );
  const view = views.get(key);
  if (part === 'search') {
    const needle = text.toLowerCase();
    return {
      text,
      positions: needle.trim()
        ? view.flatMap((line, position) => (withoutEscapes(line[2]).toLowerCase().includes(needle) ? [position] : []))
        : [],
      is_complete: true,
    };
  }
  const start = Math.max(0, first < 0 ? first + view.length : first);
  const page = view
    .slice(start, start + count)
    .map(([origin, at, one]) => ({ ...sources[origin], at: at == null ? null : new Date(at * 1000).toISOString(), text: one }));
  return { total: view.length, first: start, sources, lines: page, is_complete: true, remarks: report.logs.remarks };
}
