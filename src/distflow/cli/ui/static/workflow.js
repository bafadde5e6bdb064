// The page of one workflow, with its sections.

import {
  ago,
  amount,
  ansi,
  badge,
  bytes,
  clock,
  day,
  duration,
  h,
  nowSeconds,
  render,
  seconds,
  withCode,
  withoutEscapes,
} from './dom.js';
import { chartView } from './charts.js';
import { logView } from './logs.js';
import { graph, rankDrawing, timeline } from './shapes.js';
import { get, onChange, post, report } from './source.js';

const SECTIONS = {
  overview: 'Overview',
  logs: 'Logs',
  metrics: 'Metrics',
  events: 'Events',
  diagnosis: 'Diagnosis',
  outputs: 'Outputs',
  stacks: 'Stacks',
  spec: 'Spec',
};

export function workflowPage(main, id, section, query, about) {
  const key = encodeURIComponent(id),
    base = `#/workflows/${key}`,
    path = `workflows/${key}`;
  let status = null,
    own = null,
    drawn = '';
  const head = h('header', { class: 'title' }),
    body = h('div', { class: 'body' });
  const shown = Object.entries(SECTIONS).filter(([name]) => !report || name !== 'stacks');
  const nav = h(
    'nav',
    { class: 'sections', 'aria-label': 'Sections' },
    shown.map(([name, title]) =>
      h('a', { href: name === 'overview' ? base : `${base}/${name}`, 'aria-current': name === section ? 'page' : null }, title),
    ),
  );
  render(main, head, nav, body);
  nav.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest' }); // on a narrow screen
  const colorOf = (task) => status.groups.flatMap((group) => [...new Set(group.tasks.map((one) => one.name))]).indexOf(task) % 8;

  const sections = {
    overview: {
      update: async () => {
        const { events } = await get(`${path}/events`);
        render(body, overview(status, events, base));
      },
    },
    logs: { start: () => logView(key, query, colorOf) },
    metrics: { start: () => chartView(id, query) },
    events: { update: async () => render(body, eventTable(await get(`${path}/events`))) },
    diagnosis: {
      update: async () => {
        const [why, diagnose] = await Promise.all([get(`${path}/why`), get(`${path}/diagnose`)]);
        render(body, diagnosis(why, diagnose, base));
      },
    },
    outputs: {
      once: true,
      update: async () => {
        wait('Reading the lists of files from the nodes …');
        render(body, outputs(await get(`${path}/outputs`), path));
      },
    },
    stacks: { once: true, update: async () => stacks() },
    spec: {
      once: true,
      update: async () => {
        const { spec } = await get(`${path}/spec`);
        render(body, h('section', { class: 'card' }, pre(spec, 'Spec')));
      },
    },
  };
  const wait = (text) => render(body, h('p', { class: 'quiet card', role: 'status' }, text));
  const fail = (error) =>
    render(
      body,
      h(
        'div',
        { class: 'card error', role: 'alert' },
        h('b', {}, error.message),
        error.hint ? h('p', {}, withCode(error.hint)) : null,
      ),
    );

  async function stacks() {
    const load = async () => {
      wait('Reading the stacks of the running processes …');
      try {
        const found = await get(`${path}/stacks`);
        show(pre(found.text, 'Stacks'));
      } catch (error) {
        show(h('p', { class: 'quiet' }, error.message));
      }
    };
    const show = (content) =>
      render(
        body,
        h(
          'section',
          { class: 'card' },
          h(
            'div',
            { class: 'toolbar' },
            h('button', { type: 'button', 'data-key': 'stacks', onclick: load }, 'Read the stacks now'),
          ),
          content,
        ),
      );
    show(h('p', { class: 'quiet' }, 'The call stacks of all running processes, at one moment. The processes are not stopped.'));
  }
  function drawHead() {
    document.title = `${status.workflow_id} · ${status.status.toLowerCase()} · distflow`;
    const facts = [
      ['Pool', status.pool],
      ['Submitted', report ? day(status.submitted_at) : ago(status.submitted_at), day(status.submitted_at)],
      [
        'Duration',
        duration(seconds(status.started_at) && (seconds(status.ended_at) ?? nowSeconds()) - seconds(status.started_at)),
      ],
      ['User', status.submitted_by],
      status.priority === 'NORMAL' ? null : ['Priority', status.priority.toLowerCase()],
      status.parent_name
        ? [
            'Restarts',
            report
              ? status.parent_name
              : h('a', { href: `#/workflows/${encodeURIComponent(status.parent_name)}` }, status.parent_name),
          ]
        : null,
    ];
    const words = [
      ...Object.entries(status.labels).map(([name, value]) => `${name}=${value}`),
      ...status.tags.map((tag) => `#${tag}`),
    ];
    render(
      head,
      h('div', { class: 'line' }, h('h1', {}, status.workflow_id), badge(status.status), h('span', { class: 'grow' }), actions()),
      h(
        'dl',
        { class: 'facts' },
        facts.filter(Boolean).map(([name, value, title]) => h('div', {}, h('dt', {}, name), h('dd', { title }, value))),
      ),
      words.length
        ? h(
            'ul',
            { class: 'chips', 'aria-label': 'Labels and tags' },
            words.map((word) => h('li', {}, word)),
          )
        : null,
      (status.warnings ?? []).map((text) => h('p', { class: 'warning' }, text)),
    );
  }
  function actions() {
    if (!about.actions || report) return null;
    const act = async (name) => {
      try {
        const found = await post(`${path}/${name}`);
        if (name === 'restart') location.hash = `#/workflows/${encodeURIComponent(found.workflow_id)}`;
        else update();
      } catch (error) {
        fail(error);
      }
    };
    const isOver = Boolean(status.ended_at);
    if (isOver)
      return status.status === 'COMPLETED'
        ? null
        : h('button', { type: 'button', 'data-key': 'restart', onclick: () => act('restart') }, 'Restart');
    return h(
      'button',
      {
        type: 'button',
        class: 'danger',
        'data-key': 'cancel',
        onclick: () => confirmed(`Cancel ${status.workflow_id}?`, 'Cancel the workflow', () => act('cancel')),
      },
      'Cancel',
    );
  }
  async function update() {
    try {
      status = await get(`${path}/status`);
      drawHead();
      const mine = sections[section] ?? sections.overview;
      if (mine.start) {
        if (!own) {
          own = mine.start();
          render(body, own.element);
          if (section === 'metrics') await own.update();
        } else await own.update();
      } else if (!mine.once || drawn !== status.state) {
        drawn = status.state;
        await mine.update();
      }
    } catch (error) {
      fail(error);
    }
  }
  const stop = onChange(id, update);
  let ticks = 0;
  const timer = report
    ? null
    : setInterval(() => {
        if (!status || status.ended_at) return;
        drawHead();
        ticks += 1;
        if (ticks % 10 === 0 && ['overview', 'metrics'].includes(section)) update(); // samples arrive without any other change
      }, 1000);
  return {
    ready: update(),
    redraw: () => own?.redraw?.(),
    close: () => {
      stop();
      clearInterval(timer);
      own?.destroy?.();
    },
  };
}

function confirmed(question, label, call) {
  const dialog = h(
    'dialog',
    {
      'aria-label': question,
      onclose: () => {
        if (dialog.returnValue === 'yes') call();
        dialog.remove();
      },
    },
    h(
      'form',
      { method: 'dialog' },
      h('p', {}, question),
      h(
        'div',
        { class: 'toolbar' },
        h('button', { value: 'no', autofocus: true }, 'Back'),
        h('button', { value: 'yes', class: 'danger' }, label),
      ),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
}

const pre = (text, label) => h('pre', { tabindex: '0', role: 'region', 'aria-label': label }, text);

// The directories of an attempt on its node, which are removed from tracebacks because they do not help a reader.
const NODE_PATH = /\/[^\s"']*?\/distflow-node\/[0-9a-f]{32}\/[\w-]+\/[\w-]+\/\d+\/(work|files)\//g;

// Returns the text of the line that shows a cause, for a search of the log.
const lineOf = (cause) =>
  withoutEscapes(cause.traceback?.trimEnd().split('\n').at(-1) ?? cause.lines.at(-1) ?? '')
    .trim()
    .slice(0, 200);

function causeCard(cause, title, base, remedy) {
  const where = [
    cause.node ? `on ${cause.node}` : null,
    cause.ranks ? `rank${cause.ranks.includes('-') ? 's' : ''} ${cause.ranks}` : null,
    clock(cause.at, true),
  ]
    .filter(Boolean)
    .join(' · ');
  const line = lineOf(cause),
    text = (cause.traceback?.trimEnd() || cause.lines.join('\n')).replace(NODE_PATH, (_, kind) => (kind === 'files' ? '/' : ''));
  return h(
    'section',
    { class: 'card cause', 'aria-label': title },
    h('h2', {}, title),
    h('p', { class: 'what' }, h('b', {}, cause.task), ' ', h('span', { class: 'quiet' }, where)),
    h('p', {}, cause.message || cause.reason.toLowerCase().replaceAll('_', ' ')),
    remedy ? h('p', { class: 'remedy' }, h('b', {}, 'Remedy '), withCode(remedy)) : null,
    text ? pre(text, cause.traceback ? 'Traceback' : 'Last lines') : null,
    cause.kernel.length ? pre(cause.kernel.join('\n'), 'Messages of the kernel') : null,
    line
      ? h(
          'a',
          { class: 'button', href: `${base}/logs?task=${encodeURIComponent(cause.task)}&find=${encodeURIComponent(line)}` },
          'Show in the log',
        )
      : null,
  );
}

function overview(status, events, base) {
  const groups = status.groups;
  const slow = (group) =>
    new Set(
      String(group.metrics?.values.stragglers ?? '')
        .split(',')
        .filter(Boolean)
        .map(Number),
    );
  return [
    groups
      .filter((group) => group.first_cause)
      .map((group) =>
        causeCard(group.first_cause, groups.length > 1 ? `First cause in ${group.name}` : 'First cause', base, group.remedy),
      ),
    groups
      .filter((group) => !group.first_cause && group.message && group.reason !== 'UPSTREAM' && group.state !== 'WAITING')
      .map((group) => h('p', { class: 'card' }, h('b', {}, `${group.name}: `), group.message)),
    groups.length > 1 ? h('section', { class: 'card' }, h('h2', {}, 'Groups'), graph(groups, base)) : null,
    h('section', { class: 'card' }, h('h2', {}, 'Timeline'), timeline(status, events)),
    groups
      .filter((group) => group.metrics || group.tasks.some((task) => task.ranks))
      .map((group) =>
        h(
          'section',
          { class: 'card' },
          h('h2', {}, groups.length > 1 ? `Ranks of ${group.name}` : 'Ranks'),
          group.metrics
            ? h(
                'p',
                { class: 'quiet' },
                `Step ${group.metrics.step}: `,
                Object.entries(group.metrics.values)
                  .slice(0, 6)
                  .map(([name, value]) => `${name} ${typeof value === 'number' ? amount(value) : value}`)
                  .join(', '),
              )
            : null,
          group.tasks.some((task) => task.ranks) ? rankDrawing(group, slow(group)) : null,
        ),
      ),
    h('section', { class: 'card' }, h('h2', {}, 'Tasks'), taskTable(groups, base)),
  ];
}

function taskTable(groups, base) {
  const rows = groups.flatMap((group) => group.tasks.map((task) => [group, task])),
    isSeveral = groups.length > 1,
    isUsed = rows.some(([, task]) => task.usage);
  const useOf = (usage) =>
    [
      usage.cpu == null ? '' : `${Number(usage.cpu.toFixed(2))} cores`,
      usage.memory == null ? '' : bytes(usage.memory),
      usage.gpu_utilization == null ? '' : `GPU ${Math.round(usage.gpu_utilization)}%`,
      usage.gpu_memory == null ? '' : bytes(usage.gpu_memory),
    ]
      .filter(Boolean)
      .join(' · ');
  return h(
    'div',
    { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Tasks' },
    h(
      'table',
      {},
      h(
        'thead',
        {},
        h(
          'tr',
          {},
          [isSeveral ? 'Group' : null, 'Task', 'Status', 'Node', 'Exit', 'Duration', isUsed ? 'Use' : null, 'Last line']
            .filter(Boolean)
            .map((name) => h('th', { scope: 'col' }, name)),
        ),
      ),
      h(
        'tbody',
        {},
        rows
          .slice(0, 300)
          .map(([group, task]) =>
            h(
              'tr',
              {},
              isSeveral ? h('td', {}, group.name) : null,
              h(
                'th',
                { scope: 'row' },
                h(
                  'a',
                  { href: `${base}/logs?task=${encodeURIComponent(task.name)}`, 'data-key': `${task.name}/${task.retry_id}` },
                  task.name,
                ),
                task.retry_id ? h('span', { class: 'quiet' }, ` retry ${task.retry_id}`) : null,
              ),
              h(
                'td',
                {},
                badge(task.status),
                task.transfer
                  ? h('span', { class: 'quiet' }, ` ${bytes(task.transfer.sent_bytes)} of ${bytes(task.transfer.total_bytes)}`)
                  : null,
              ),
              h('td', { class: 'name' }, task.node_name ?? ''),
              h('td', { class: 'number' }, task.exit_code ?? ''),
              h('td', { class: 'number' }, duration(task.duration)),
              isUsed ? h('td', { class: 'number' }, task.usage ? useOf(task.usage) : '') : null,
              h('td', { class: 'code' }, ansi((task.last_line ?? task.failure_message ?? '').slice(0, 300))),
            ),
          ),
      ),
    ),
  );
}

function eventTable({ events }) {
  return h(
    'section',
    { class: 'card', 'aria-label': 'Events' },
    h(
      'div',
      { class: 'scroll events', tabindex: '0', role: 'region', 'aria-label': 'Events' },
      h(
        'table',
        {},
        h(
          'thead',
          {},
          h(
            'tr',
            {},
            ['Time', 'Kind', 'Event'].map((name) => h('th', { scope: 'col', class: name === 'Kind' ? 'wide' : null }, name)),
          ),
        ),
        h(
          'tbody',
          {},
          events
            .slice(-2000)
            .map((event) =>
              h(
                'tr',
                {},
                h('td', { class: 'number', title: day(event.at) }, clock(event.at, true)),
                h('td', { class: 'quiet wide' }, event.kind),
                h('td', {}, event.text),
              ),
            ),
        ),
      ),
    ),
  );
}

function diagnosis(why, diagnose, base) {
  const examined = (isWanted) => diagnose.groups.filter(isWanted).map(examinedGroup);
  return [
    why.message ? h('p', { class: 'card' }, why.message) : null,
    why.groups.map((group) => [
      group.first_cause
        ? causeCard(group.first_cause, `First cause in ${group.name}`, base)
        : h('p', { class: 'card' }, h('b', {}, `${group.name}: `), group.message ?? ''),
      examined((one) => one.name === group.name),
      group.timeline.length ? moments(group) : null,
    ]),
    examined((one) => !why.groups.some((group) => group.name === one.name)),
  ];
}

const examinedGroup = (group) => [
  group.message || group.diagnoses.length ? foundCard(`Diagnosis of ${group.name}`, group.message, group.diagnoses) : null,
  group.findings.length ? foundCard(`Findings in the use of resources by ${group.name}`, null, group.findings) : null,
];

function foundCard(title, message, items) {
  return h(
    'section',
    { class: 'card' },
    h('h2', {}, title),
    message ? h('p', {}, message) : null,
    items.map((found) =>
      h(
        'div',
        { class: 'found' },
        h('h3', {}, found.cause),
        found.found ? h('p', {}, found.found) : null,
        h('p', { class: 'remedy' }, h('b', {}, 'Remedy '), withCode(found.remedy)),
        found.traceback || found.line ? pre(found.traceback ?? found.line, 'Evidence') : null,
      ),
    ),
  );
}

function moments(group) {
  return h(
    'section',
    { class: 'card' },
    h('h2', {}, 'What happened when'),
    h(
      'div',
      { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Times' },
      h(
        'table',
        {},
        h(
          'thead',
          {},
          h(
            'tr',
            {},
            ['Time', 'Node', 'Task', 'What', 'Because'].map((name) => h('th', { scope: 'col' }, name)),
          ),
        ),
        h(
          'tbody',
          {},
          group.timeline.map((moment) =>
            h(
              'tr',
              {},
              h('td', { class: 'number' }, `${moment.offset_s < 0 ? '−' : '+'}${Math.abs(moment.offset_s).toFixed(3)} s`),
              h('td', {}, moment.node ?? ''),
              h('td', {}, moment.task ?? ''),
              h('td', {}, moment.text),
              h('td', {}, moment.because ?? ''),
            ),
          ),
        ),
      ),
    ),
  );
}

function outputs({ tasks }, path) {
  const empty = tasks.filter((task) => !task.files.length && !task.error);
  return [
    tasks
      .filter((task) => !empty.includes(task))
      .map((task) =>
        h(
          'section',
          { class: 'card' },
          h('h2', {}, task.name, h('span', { class: 'quiet' }, ` on ${task.node}`)),
          task.error ? h('p', { class: 'error' }, task.error) : null,
          task.files.length
            ? h(
                'table',
                { class: 'files' },
                h(
                  'thead',
                  {},
                  h(
                    'tr',
                    {},
                    ['File', 'Size', 'Modified'].map((name) => h('th', { scope: 'col' }, name)),
                  ),
                ),
                h(
                  'tbody',
                  {},
                  task.files.slice(0, 2000).map((file) =>
                    h(
                      'tr',
                      {},
                      h(
                        'th',
                        { scope: 'row' },
                        report
                          ? file.path
                          : h(
                              'a',
                              {
                                href: `/api/${path}/file?${new URLSearchParams({ task: task.name, path: file.path })}`,
                                download: '',
                              },
                              file.path,
                            ),
                      ),
                      h('td', { class: 'number' }, bytes(file.bytes)),
                      h('td', { class: 'number' }, day(file.modified_at)),
                    ),
                  ),
                ),
              )
            : null,
        ),
      ),
    empty.length ? h('p', { class: 'quiet' }, `No files: ${empty.map((task) => task.name).join(', ')}`) : null,
  ];
}
