// The log of a workflow. Only lines near the visible ones are elements, so a log may have a million lines.

import { ansi, clock, h } from './dom.js';
import { get } from './source.js';

const ROW = 19,
  PAGE = 200,
  MOST_PAGES = 24;

export function logView(workflow, query, taskColor) {
  const pages = new Map();
  let total = 0,
    follow = !query.find,
    task = query.task ?? '',
    rank = query.rank ?? '',
    hits = [],
    hit = -1,
    generation = 0,
    marked = -1;
  let known = '';
  const rows = h('div', { class: 'rows' });
  const space = h('div', { class: 'space' }, rows);
  const view = h('div', { class: 'lines', tabindex: '0', role: 'region', 'aria-label': 'Log lines' }, space);
  const choose = h(
    'select',
    {
      'aria-label': 'Task or rank',
      onchange: () => {
        [task, rank] = JSON.parse(choose.value);
        reset();
      },
    },
    h('option', { value: '["",""]' }, 'all tasks'),
  );
  const find = h('input', {
    type: 'search',
    placeholder: 'Search the log',
    'aria-label': 'Search the log',
    'data-focus': '',
    value: query.find ?? '',
    onkeydown: (event) => {
      if (event.key === 'Enter') {
        event.preventDefault();
        if (find.value === searched) step(event.shiftKey ? -1 : 1);
        else search();
      }
    },
    oninput: () => {
      if (!find.value) search();
    },
  });
  const count = h('output', { class: 'quiet hits', 'aria-live': 'polite' });
  const followBox = h('input', {
    type: 'checkbox',
    onchange: () => {
      follow = followBox.checked;
      if (follow) toEnd();
    },
  });
  followBox.checked = follow;
  const timeBox = h('input', { type: 'checkbox', onchange: () => view.classList.toggle('timed', timeBox.checked) });
  const notes = h('p', { class: 'quiet note' });
  const bar = h(
    'div',
    { class: 'toolbar' },
    choose,
    find,
    h('button', { type: 'button', 'aria-label': 'Previous match', onclick: () => step(-1) }, '↑'),
    h('button', { type: 'button', 'aria-label': 'Next match', onclick: () => step(1) }, '↓'),
    count,
    h('span', { class: 'grow' }),
    h('label', {}, timeBox, ' Times'),
    h('label', {}, followBox, ' Follow'),
  );
  let searched = '',
    areAllFound = true;

  const params = () => ({ task, rank });
  async function load(number) {
    const mine = generation;
    pages.set(number, null);
    const page = await get(`workflows/${workflow}/logs`, { ...params(), first: number * PAGE, count: PAGE }).catch(() => null);
    if (mine !== generation) return;
    if (!page) {
      pages.delete(number);
      return;
    }
    pages.set(number, page.lines);
    if (pages.size > MOST_PAGES) pages.delete(pages.keys().next().value);
    grow(page);
    draw();
  }
  function grow(page) {
    total = page.total;
    space.style.height = `${Math.max(1, total) * ROW}px`;
    const options = [
      ['all tasks', '', ''],
      ...[...new Set(page.sources.map((one) => one.task))].map((name) => [name, name, '']),
      ...page.sources
        .filter((one) => one.rank != null)
        .sort((a, b) => a.rank - b.rank)
        .map((one) => [`rank ${one.rank} (${one.task})`, one.task, String(one.rank)]),
    ];
    if (known !== JSON.stringify(options)) {
      known = JSON.stringify(options);
      choose.replaceChildren(
        ...options.map(([label, ...value]) =>
          h('option', { value: JSON.stringify(value), selected: value[0] === task && value[1] === rank }, label),
        ),
      );
    }
    notes.textContent = [
      page.removed ? `The first ${page.removed.toLocaleString('en')} lines are left out.` : '',
      ...(page.remarks ?? []),
    ].join(' ');
    view.dataset.total = total;
  }
  function draw() {
    const first = Math.max(0, Math.floor(view.scrollTop / ROW) - 10),
      last = Math.min(total, Math.ceil((view.scrollTop + view.clientHeight) / ROW) + 10);
    for (let page = Math.floor(first / PAGE); page * PAGE < Math.max(last, 1); page += 1) if (!pages.has(page)) load(page);
    const found = [];
    for (let position = first; position < last; position += 1) {
      const line = pages.get(Math.floor(position / PAGE))?.[position % PAGE];
      found.push(row(position, line));
    }
    rows.style.transform = `translateY(${first * ROW}px)`;
    rows.replaceChildren(...found);
  }
  function row(position, line) {
    if (!line) return h('div', { class: 'row' }, '…');
    const who = line.rank == null ? line.task : `${line.task}:${line.rank}`;
    return h(
      'div',
      { class: `row${position === marked ? ' marked' : ''}`, 'aria-current': position === marked ? 'true' : null },
      h('span', { class: 'at' }, clock(line.at, true)),
      h('span', { class: `who s${taskColor(line.task)}`, title: who }, who),
      h('span', { class: 'text' }, highlight(ansi(line.text))),
    );
  }
  function highlight(parts) {
    if (!searched) return parts;
    return parts.map((part) => {
      const text = typeof part === 'string' ? part : part.textContent,
        at = text.toLowerCase().indexOf(searched.toLowerCase());
      if (at < 0) return part;
      const end = at + searched.length;
      return h('span', { class: part.className }, text.slice(0, at), h('mark', {}, text.slice(at, end)), text.slice(end));
    });
  }
  async function search() {
    const mine = generation,
      wanted = find.value;
    searched = wanted;
    let found = { positions: [], is_complete: true },
      problem = 'no match';
    try {
      if (wanted.trim()) found = await get(`workflows/${workflow}/search`, { ...params(), text: wanted });
    } catch (error) {
      problem = error.message;
    }
    if (mine !== generation || searched !== wanted) return;
    areAllFound = found.is_complete;
    hits = found.positions;
    hit = hits.length && query.find ? hits.length - 2 : -1;
    query.find = null;
    if (hits.length) step(1);
    else {
      count.textContent = wanted ? problem : '';
      marked = -1;
      draw();
    }
  }
  function step(by) {
    if (!hits.length) return;
    hit = (hit + by + hits.length) % hits.length;
    marked = hits[hit];
    followBox.checked = follow = false;
    count.textContent = `${hit + 1} of ${hits.length.toLocaleString('en')}${areAllFound ? '' : '+'}`;
    view.scrollTop = Math.max(0, marked * ROW - view.clientHeight / 2);
    draw();
  }
  const toEnd = () => {
    view.scrollTop = view.scrollHeight;
    draw();
  };
  async function reset() {
    generation += 1;
    pages.clear();
    marked = -1;
    await update();
    if (find.value) search();
  }
  async function update() {
    const mine = generation;
    const end = await get(`workflows/${workflow}/logs`, { ...params(), first: -PAGE, count: PAGE });
    if (mine !== generation) return;
    pages.delete(Math.floor(total / PAGE));
    if (end.total < total) pages.clear();
    const number = Math.floor(end.first / PAGE);
    grow(end);
    // The last lines belong to one or two pages. The response contains all lines of the last page.
    const start = Math.floor((end.total - 1) / PAGE);
    if (start >= number && end.total) pages.set(start, end.lines.slice(start * PAGE - end.first));
    if (follow) toEnd();
    else draw();
    if (!end.is_complete && !end.total) notes.textContent = 'There is no output yet.';
  }
  view.addEventListener('scroll', () => {
    const isAtEnd = view.scrollTop + view.clientHeight >= view.scrollHeight - ROW;
    if (follow && !isAtEnd) followBox.checked = follow = false;
    requestAnimationFrame(draw);
  });
  const element = h('section', { class: 'card log', 'aria-label': 'Log' }, bar, view, notes);
  update().then(() => {
    if (find.value) search();
  });
  return { element, update };
}
