// The pages of all workflows, and of pools with their nodes.

import { ago, badge, bytes, day, duration, h, nowSeconds, render, seconds, withCode } from './dom.js';
import { get, onChange } from './source.js';

const LIST_PAGE = 100,
  MAX_COUNT = 500, // the server's limit for one request
  STATES = { '': 'All', active: 'Active', completed: 'Completed', failed: 'Failed', canceled: 'Canceled' };

export function workflowsPage(main, query) {
  document.title = 'Workflows · distflow';
  let text = query.text ?? '',
    state = query.state ?? '',
    count = LIST_PAGE,
    turn = 0;
  const find = h('input', {
    type: 'search',
    value: text,
    placeholder: 'Filter: name, key=value, #tag',
    'aria-label': 'Filter workflows',
    'data-focus': '',
    oninput: () => {
      text = find.value;
      count = LIST_PAGE;
      later();
    },
  });
  const chips = h(
    'div',
    { class: 'choice', role: 'group', 'aria-label': 'Status' },
    Object.entries(STATES).map(([value, label]) =>
      h(
        'button',
        {
          type: 'button',
          value,
          'aria-pressed': String(value === state),
          onclick: () => {
            state = value;
            count = LIST_PAGE;
            update();
          },
        },
        label,
      ),
    ),
  );
  const body = h('div', {}),
    note = h('p', { class: 'quiet note', role: 'status' });
  render(
    main,
    h('header', { class: 'title' }, h('h1', {}, 'Workflows')),
    h('div', { class: 'toolbar' }, find, chips),
    body,
    note,
  );
  let timer = null;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(update, 120);
  };

  async function update() {
    const mine = ++turn;
    history.replaceState(null, '', `#/${text || state ? `?${new URLSearchParams({ text, state })}` : ''}`);
    for (const one of chips.children) one.setAttribute('aria-pressed', String(one.value === state));
    try {
      const workflows = [];
      while (workflows.length <= count) {
        const size = Math.min(MAX_COUNT, count + 1 - workflows.length);
        const found = await get('workflows', { text, state, count: size, offset: workflows.length });
        if (mine !== turn) return;
        workflows.push(...found.workflows);
        if (found.workflows.length < size) break;
      }
      const shown = workflows.slice(0, count);
      note.textContent = workflows.length
        ? `${workflows.length > count ? 'the newest ' : ''}${shown.length} workflow${shown.length === 1 ? '' : 's'}`
        : text || state
          ? 'No workflow matches.'
          : 'There are no workflows yet. Start one with: distflow workflow submit FILE';
      render(
        body,
        shown.length ? table(shown) : null,
        workflows.length > count
          ? h(
              'button',
              {
                type: 'button',
                'data-key': 'more',
                onclick: () => {
                  count += Math.min(count, MAX_COUNT);
                  update();
                },
              },
              'Show more',
            )
          : null,
      );
    } catch (error) {
      note.textContent = error.message;
    }
  }
  const stop = onChange(null, update),
    clockTimer = setInterval(update, 15000);
  return {
    ready: update(),
    close: () => {
      stop();
      clearInterval(clockTimer);
    },
  };
}

function table(workflows) {
  const heads = [['Workflow'], ['Status'], ['Submitted'], ['Duration', 'number'], ['Pool', 'wide'], ['Labels and tags', 'wide']];
  return h(
    'div',
    { class: 'card flush' },
    h(
      'table',
      { onkeydown: moveFocus },
      h(
        'thead',
        {},
        h(
          'tr',
          {},
          heads.map(([name, kind]) => h('th', { scope: 'col', class: kind }, name)),
        ),
      ),
      h(
        'tbody',
        {},
        workflows.map((one) =>
          h(
            'tr',
            {},
            h('th', { scope: 'row' }, h('a', { href: `#/workflows/${encodeURIComponent(one.workflow_id)}` }, one.workflow_id)),
            h('td', {}, badge(one.status)),
            h('td', { class: 'time', title: day(one.submitted_at) }, ago(one.submitted_at)),
            h(
              'td',
              { class: 'number' },
              duration(seconds(one.started_at) && (seconds(one.ended_at) ?? nowSeconds()) - seconds(one.started_at)),
            ),
            h('td', { class: 'wide' }, one.pool),
            h(
              'td',
              { class: 'wide quiet' },
              [
                ...Object.entries(one.labels).map(([name, value]) => `${name}=${value}`),
                ...one.tags.map((tag) => `#${tag}`),
              ].join(' · '),
            ),
          ),
        ),
      ),
    ),
  );
}

function moveFocus(event) {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key],
    links = [...event.currentTarget.querySelectorAll('a')],
    at = links.indexOf(document.activeElement);
  if (!by || at < 0) return;
  event.preventDefault();
  links[Math.max(0, Math.min(links.length - 1, at + by))].focus();
}

const OWNERS = {
  free: 'free',
  mine: 'yours',
  other: 'another user',
  foreign: 'another program',
  unknown: 'unknown',
};

export function poolsPage(main) {
  document.title = 'Pools · distflow';
  const body = h('div', {});
  render(
    main,
    h(
      'header',
      { class: 'title' },
      h(
        'div',
        { class: 'line' },
        h('h1', {}, 'Pools and nodes'),
        h('span', { class: 'grow' }),
        h('button', { type: 'button', onclick: () => update() }, 'Refresh'),
      ),
    ),
    h(
      'ul',
      { class: 'legend', 'aria-label': 'Colors of GPUs' },
      Object.entries(OWNERS).map(([name, label]) =>
        h('li', {}, h('span', { class: `key gpu ${name}`, 'aria-hidden': 'true' }), label),
      ),
    ),
    body,
  );

  async function update() {
    try {
      const { pools, default_pool: main } = await get('pools');
      const cards = new Map(pools.map((pool) => [pool.name, h('section', { class: 'pool', 'aria-label': pool.name })]));
      render(body, [...cards.values()]);
      await Promise.all(
        pools.map(async (pool) => {
          const show = (document, note) =>
            render(cards.get(pool.name), poolCard(pool, pool.name === main, document.resources, note));
          show(await get(`pools/${encodeURIComponent(pool.name)}`), pool.nodes.length ? 'querying the nodes …' : null);
          if (pool.nodes.length) show(await get(`pools/${encodeURIComponent(pool.name)}`, { live: 1 }), null);
        }),
      );
    } catch (error) {
      render(
        body,
        h('div', { class: 'card error', role: 'alert' }, error.message, error.hint ? h('p', {}, withCode(error.hint)) : null),
      );
    }
  }
  return { ready: update(), close: () => {} };
}

function poolCard(pool, isDefault, nodes, note) {
  return [
    h(
      'h2',
      {},
      pool.name,
      h('span', { class: 'quiet' }, ` ${pool.backend}${isDefault ? ' · default' : ''}`),
      note ? h('span', { class: 'quiet', role: 'status' }, ` · ${note}`) : null,
    ),
    nodes.length
      ? h(
          'ul',
          { class: 'machines' },
          nodes.map((node) => machine(node)),
        )
      : h('p', { class: 'card quiet' }, `The nodes are chosen by ${pool.backend}.`),
  ];
}

function machine(node) {
  const owner = new Map((node.gpus ?? []).map(({ index, state, by }) => [index, [state, by]]));
  const { allocatable_fields: total, usage_fields: used } = node;
  const answered = node.gpus && !node.error;
  if (!answered) for (let gpu = 0; gpu < used.gpu; gpu += 1) owner.set(gpu, ['mine', 'yours']);
  const gpus = Math.max(total.gpu ?? 0, ...[...owner.keys()].map((gpu) => gpu + 1));
  const meter = (label, have, of, text) =>
    of
      ? h(
          'div',
          { class: 'meter' },
          h('span', {}, label),
          h(
            'span',
            { class: 'bar', 'aria-hidden': 'true' },
            h('span', { style: { width: `${Math.min(100, (100 * have) / of)}%` } }),
          ),
          h('span', { class: 'value' }, text),
        )
      : null;
  return h(
    'li',
    { class: 'card' },
    h('h3', {}, node.hostname, h('span', { class: 'quiet' }, ` ${Object.values(node.pool_platform_labels).flat().join(' ')}`)),
    gpus
      ? h(
          'ol',
          { class: 'gpus', 'aria-label': `GPUs of ${node.hostname}` },
          Array.from({ length: gpus }, (_, gpu) => {
            const [kind, who] = owner.get(gpu) ?? [answered ? 'free' : 'unknown', ''];
            return h(
              'li',
              { class: `gpu ${kind}`, title: `GPU ${gpu}: ${OWNERS[kind]}${who ? ` (${who})` : ''}` },
              String(gpu),
              h('span', { class: 'sr' }, ` ${OWNERS[kind]} ${who}`),
            );
          }),
        )
      : h('p', { class: 'quiet' }, 'no GPUs'),
    meter('CPUs', used.cpu, total.cpu, `${used.cpu} / ${total.cpu}`),
    meter('Memory', used.memory, total.memory, `${bytes(used.memory)} / ${bytes(total.memory)}`),
    node.tasks.length
      ? h(
          'ul',
          { class: 'plain' },
          node.tasks
            .slice(0, 12)
            .map((name) => h('li', {}, h('a', { href: `#/workflows/${encodeURIComponent(name.split('/')[0])}` }, name))),
        )
      : null,
    node.error ? h('p', { class: 'error' }, node.error) : null,
  );
}
