// Drawings of a workflow: the graph of its groups, the ranks on their nodes, and the timeline of its tasks.

import { badge, clock, duration, h, nowSeconds, ranksOf, seconds, tone } from './dom.js';

const MOST_ROWS = 200,
  MOST_CELLS = 1024;

export function graph(groups, base) {
  const depth = new Map(),
    byName = new Map(groups.map((one) => [one.name, one]));
  const depthOf = (name) => {
    if (!depth.has(name)) {
      depth.set(name, 0);
      depth.set(name, Math.max(-1, ...(byName.get(name)?.upstream_groups ?? []).map(depthOf)) + 1);
    }
    return depth.get(name);
  };
  const columns = [];
  for (const { name } of groups) (columns[depthOf(name)] ??= []).push(name);
  const [wide, high, gapX, gapY] = [212, 50, 48, 14],
    place = new Map();
  const most = Math.max(...columns.map((column) => column.length));
  columns.forEach((column, x) =>
    column.forEach((name, y) => place.set(name, [x * (wide + gapX) + 1, (y + (most - column.length) / 2) * (high + gapY) + 1])),
  );
  const edges = groups.flatMap((group) =>
    group.upstream_groups
      .filter((name) => place.has(name))
      .map((name) => {
        const [fromX, fromY] = place.get(name),
          [toX, toY] = place.get(group.name),
          [x1, y1, x2, y2] = [fromX + wide, fromY + high / 2, toX, toY + high / 2];
        return h('path', { class: 'edge', d: `M${x1} ${y1} C${x1 + gapX / 2} ${y1} ${x2 - gapX / 2} ${y2} ${x2} ${y2}` });
      }),
  );
  const width = columns.length * (wide + gapX) - gapX + 2,
    height = most * (high + gapY) - gapY + 2;
  const drawing = h('svg', { width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' }, edges);
  const boxes = groups.map((group) => {
    const [x, y] = place.get(group.name),
      count = new Set(group.tasks.map((task) => task.name)).size;
    return h(
      'li',
      { class: `node ${tone(group.status)}`, style: { left: `${x}px`, top: `${y}px`, width: `${wide}px`, height: `${high}px` } },
      h(
        'a',
        { href: `${base}/logs?task=${encodeURIComponent(group.tasks[0]?.name ?? '')}`, title: group.message || group.name },
        group.name,
      ),
      h(
        'span',
        {},
        badge(group.status),
        h('span', { class: 'quiet' }, ` ${count} task${count === 1 ? '' : 's'}`),
      ),
    );
  });
  return h(
    'div',
    { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Graph of groups' },
    h('div', { class: 'graph', style: { width: `${width}px`, height: `${height}px` } }, drawing, h('ol', {}, boxes)),
  );
}

export function rankDrawing(group, slow) {
  const latest = latestOf(group),
    cause = group.first_cause;
  const nodes = new Map();
  for (const task of latest) nodes.set(task.node_name ?? '', [...(nodes.get(task.node_name ?? '') ?? []), task]);
  const failed = new Set(ranksOf(cause?.ranks));
  const isDense = latest.reduce((sum, task) => sum + ranksOf(task.ranks).length, 0) > MOST_CELLS;
  return h(
    'ul',
    { class: 'nodes' },
    [...nodes].slice(0, MOST_ROWS).map(([node, tasks]) =>
      h(
        'li',
        {},
        h('h3', {}, node || 'no node yet'),
        tasks.map((task) => {
          const ranks = ranksOf(task.ranks);
          return h(
            'div',
            { class: `task ${tone(task.status)}` },
            h(
              'div',
              { class: 'head' },
              h('b', {}, task.name),
              task.lead ? h('span', { class: 'quiet' }, 'lead') : null,
              h('span', { class: 'grow' }),
              h('span', { class: 'quiet' }, task.gpu_ids.length ? `GPU ${rangeText(task.gpu_ids)}` : ''),
            ),
            isDense || !ranks.length
              ? h('span', { class: 'quiet' }, task.ranks ? `ranks ${task.ranks}` : 'no ranks')
              : h(
                  'ol',
                  { class: 'ranks', 'aria-label': `Ranks of ${task.name}` },
                  ranks.map((rank) => {
                    const isFirst = cause?.task === task.name && (failed.has(rank) || !failed.size),
                      isSlow = slow.has(rank);
                    return h(
                      'li',
                      {
                        class: isFirst ? 'first' : isSlow ? 'slow' : null,
                        title: isFirst ? 'first cause' : isSlow ? 'slow' : null,
                      },
                      String(rank),
                      isFirst ? h('span', { class: 'sr' }, ' first cause') : isSlow ? h('span', { class: 'sr' }, ' slow') : null,
                    );
                  }),
                ),
          );
        }),
      ),
    ),
  );
}

function rangeText(numbers) {
  const found = [];
  for (const one of numbers)
    if (found.length && one === found.at(-1)[1] + 1) found.at(-1)[1] = one;
    else found.push([one, one]);
  return found.map(([first, last]) => (first === last ? first : `${first}–${last}`)).join(', ');
}

const latestOf = (group) => group.tasks.filter((task, index) => group.tasks.findIndex((one) => one.name === task.name) === index);

// Returns the phases of one attempt of a task as [name, begin, end], in seconds since the epoch.
function phasesOf(workflow, group, task, events) {
  const own = events
    .filter((event) => event.group === group.name || event.code === 'cancel_requested')
    .map((event) => ({ ...event, time: seconds(event.at) }));
  const begun = seconds(task.started_at),
    end = seconds(task.ended_at),
    now = seconds(workflow.ended_at) ?? nowSeconds();
  const before = (test) => own.filter((event) => event.time <= (begun ?? end ?? now) && test(event)).at(-1)?.time;
  const queued =
    before((event) => event.code === 'group_rescheduled') ??
    (group.upstream_groups.length ? before((event) => event.fields.status === 'SCHEDULING') : seconds(workflow.submitted_at));
  if (queued == null) return [];
  const leased = before((event) => event.code === 'lease_granted' && event.time >= queued);
  const stop = [
    task.reason === 'PEER_FAILED' ? seconds(group.first_cause?.at) : null,
    own.find(
      (event) =>
        begun != null &&
        event.time >= begun &&
        event.time <= (end ?? now) &&
        (event.fields.status === 'STOPPING' || event.code === 'cancel_requested'),
    )?.time,
  ].filter((one) => one != null && one >= begun);
  const stopping = begun != null && stop.length ? Math.min(...stop) : null;
  const last = end ?? now;
  return [
    ['waiting', queued, leased ?? begun ?? last],
    leased == null ? null : ['staging', leased, begun ?? last],
    begun == null ? null : ['running', begun, stopping ?? last],
    stopping == null ? null : ['stopping', stopping, last],
  ].filter((one) => one && one[2] >= one[1]);
}

export function timeline(workflow, events) {
  const rows = workflow.groups.flatMap((group) =>
    group.tasks.map((task) => ({ group, task, phases: phasesOf(workflow, group, task, events) })),
  );
  const begin = seconds(workflow.submitted_at),
    end = Math.max(
      begin + 0.5,
      seconds(workflow.ended_at) ?? nowSeconds(),
      ...rows.flatMap((row) => row.phases.map((phase) => phase[2])),
    );
  const percent = (time) => `${(100 * (time - begin)) / (end - begin)}%`;
  const step =
    [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800].find(
      (one) => (end - begin) / one <= 7,
    ) ?? (end - begin) / 6;
  const ticks = [];
  for (let at = 0; at <= (end - begin) * 0.97; at += step) ticks.push(at);
  const label = (value) =>
    value === 0
      ? '0'
      : value < 60
        ? `${Number(value.toFixed(1))} s`
        : value < 3600
          ? `${Number((value / 60).toFixed(1))} min`
          : `${Number((value / 3600).toFixed(1))} h`;
  const retried = rows.some(({ task }) => task.retry_id > 0);
  return h(
    'div',
    { class: 'timeline' },
    h(
      'ul',
      { class: 'legend', 'aria-label': 'Colors of the timeline' },
      ['waiting', 'staging', 'running', 'stopping'].map((name) =>
        h('li', {}, h('span', { class: `key ${name}`, 'aria-hidden': 'true' }), name),
      ),
      workflow.groups.some((group) => group.first_cause)
        ? h('li', {}, h('span', { class: 'key first', 'aria-hidden': 'true' }), 'first cause')
        : null,
    ),
    h(
      'div',
      { class: 'axis', 'aria-hidden': 'true' },
      ticks.map((at) => h('span', { style: { left: percent(begin + at) } }, label(at))),
    ),
    h(
      'ol',
      {},
      rows.slice(0, MOST_ROWS).map(({ group, task, phases }) => {
        const causes = [group.first_cause, ...group.earlier_causes].filter(
          (cause) => cause?.task === task.name && Math.abs(seconds(cause.at) - (seconds(task.ended_at) ?? 0)) < 5,
        );
        const words = [
          ...phases.map(([name, from, to]) => `${name} ${duration(to - from)}`),
          ...causes.map((cause) => `first cause at ${clock(cause.at, true)}`),
        ].join(', ');
        return h(
          'li',
          {},
          h(
            'span',
            { class: 'label', title: task.name },
            task.name,
            retried ? h('span', { class: 'quiet' }, ` retry ${task.retry_id}`) : null,
          ),
          h(
            'div',
            { class: 'track', role: 'img', 'aria-label': `${task.name}: ${words || 'not started'}`, title: words },
            phases.map(([name, from, to]) =>
              h('span', {
                class: `phase ${name}`,
                style: { left: percent(from), width: `max(2px, ${(100 * (to - from)) / (end - begin)}%)` },
              }),
            ),
            causes.map((cause) => h('span', { class: 'mark', style: { left: percent(Math.min(end, seconds(cause.at))) } })),
          ),
        );
      }),
    ),
    rows.length > MOST_ROWS ? h('p', { class: 'quiet' }, `and ${rows.length - MOST_ROWS} more`) : null,
  );
}
