// Metrics and the use of resources as charts: one for each metric, with about 24 series (of ranks and compared runs) at most.

import { amount, bytes, duration, h, render } from './dom.js';
import { get, report } from './source.js';

const COLORS = 8,
  MOST_SERIES = 24,
  HEIGHT = 210,
  TIME_STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800],
  POWERS_OF_2 = Array.from({ length: 53 }, (_, power) => 2 ** power);
const PACE = new Set(['slowest_step_s', 'imbalance', 'total_samples_per_s']);
const USE = {
  'gpu/utilization': 'GPU utilization, %',
  'gpu/memory': 'GPU memory',
  'gpu/power': 'GPU power, W',
  'gpu/temperature': 'GPU temperature, °C',
  'gpu/memory_activity': 'GPU memory activity, %',
  'gpu/clock': 'GPU clock, MHz',
  'gpu/throttle_thermal': 'GPU slowed down by heat',
  'gpu/throttle_power': 'GPU slowed down by its power limit',
  'gpu/ecc_errors': 'GPU memory errors (ECC)',
  'gpu/xid': 'GPU driver errors (Xid)',
  'cpu/usage': 'CPU cores in use',
  'memory/usage': 'Memory',
  'disk/read': 'Disk: read per second',
  'disk/write': 'Disk: written per second',
  'network/receive': 'Network: received per second',
  'network/transmit': 'Network: sent per second',
  'rdma/receive': 'RDMA: received per second',
  'rdma/transmit': 'RDMA: sent per second',
  processes: 'Processes',
};
const BYTES = /memory(\/usage)?$|\/(read|write|receive|transmit)$|_bytes$/;

// Returns samples of the use of resources as series like those of metrics. One chart has the GPUs of all tasks.
function useSeries(samples) {
  const isRetried = samples.some((one) => one.retry_id > 0);
  return samples.map(({ task, retry_id, key, points }) => {
    const [, gpu, name] = key.match(/^system\/(?:gpu(\d+)\/)?(.*)$/);
    const kind = gpu == null ? name : `gpu/${name}`;
    return {
      isUse: true,
      order: kind in USE ? Object.keys(USE).indexOf(kind) : 99,
      kind,
      key: USE[kind] ?? kind,
      label: [task, gpu == null ? '' : `GPU ${gpu}`, isRetried ? `retry ${retry_id}` : ''].filter(Boolean).join(' · '),
      points: points.map(([at, value]) => [at, value, at]),
    };
  });
}

export function chartView(workflow, query) {
  const runs = new Map([[workflow, []]]);
  let axis = 'step',
    isLog = false,
    problem = '',
    charts = new Map(),
    wanted = (query.with ?? '').split(',');
  const grid = h('div', { class: 'charts' }),
    use = h('div', { class: 'charts' }),
    useHead = h('h2', { class: 'part', hidden: true }, 'Use of CPU, memory and GPUs');
  const chips = h('ul', { class: 'chips', 'aria-label': 'Compared runs' });
  const note = h('p', { class: 'quiet note', role: 'status' });
  const axisBox = h(
    'select',
    {
      'aria-label': 'Horizontal axis',
      onchange: () => {
        axis = axisBox.value;
        redraw();
      },
    },
    h('option', { value: 'step' }, 'by step'),
    h('option', { value: 'time' }, 'by time since start'),
  );
  const logBox = h('input', {
    type: 'checkbox',
    onchange: () => {
      isLog = logBox.checked;
      redraw();
    },
  });
  const other = h('input', {
    type: 'text',
    list: 'other-runs',
    placeholder: 'Compare with a run',
    'aria-label': 'Compare with a run',
    'data-focus': '',
  });
  const list = h('datalist', { id: 'other-runs' });
  const form = h(
    'form',
    {
      class: 'inline',
      onsubmit: (event) => {
        event.preventDefault();
        compare(other.value.trim());
      },
    },
    other,
    list,
    h('button', {}, 'Add'),
  );
  const pace = h('div');
  const element = h(
    'div',
    {},
    h('div', { class: 'toolbar' }, axisBox, h('label', {}, logBox, ' Log scale'), report ? null : form, chips),
    note,
    pace,
    grid,
    useHead,
    use,
  );
  if (!report)
    other.addEventListener(
      'focus',
      async () => {
        const found = await get('workflows', { count: 100 });
        list.replaceChildren(...found.workflows.map((one) => h('option', { value: one.workflow_id })));
      },
      { once: true },
    );

  async function compare(id) {
    if (!id || runs.has(id)) return;
    try {
      runs.set(id, await seriesOf(id));
      other.value = problem = '';
      keepInUrl();
    } catch (error) {
      problem = error.message;
    }
    redraw();
  }
  function keepInUrl() {
    if (!element.isConnected) return; // another page is shown meanwhile
    const others = [...runs.keys()].slice(1).map(encodeURIComponent).join(',');
    history.replaceState(null, '', `${location.hash.split('?')[0]}${others ? `?with=${others}` : ''}`);
  }
  async function seriesOf(id) {
    const path = `workflows/${encodeURIComponent(id)}`;
    const [metrics, samples] = await Promise.all([get(`${path}/metrics`), get(`${path}/samples`)]);
    return [...metrics.series, ...useSeries(samples.series)];
  }
  async function update() {
    runs.set(workflow, await seriesOf(workflow));
    draw();
    if (!report) for (const id of wanted.splice(0)) await compare(id);
  }
  function redraw() {
    for (const one of charts.values()) one.destroy();
    charts = new Map();
    grid.replaceChildren();
    use.replaceChildren();
    draw();
  }
  function draw() {
    render(
      chips,
      [...runs.keys()].slice(1).map((id) =>
        h(
          'li',
          {},
          id,
          h(
            'button',
            {
              type: 'button',
              'aria-label': `Remove ${id}`,
              onclick: () => {
                runs.delete(id);
                keepInUrl();
                redraw();
              },
            },
            '×',
          ),
        ),
      ),
    );
    const keys = new Map();
    for (const [run, series] of runs)
      for (const one of series) keys.set(one.key, [...(keys.get(one.key) ?? []), { run, ...one }]);
    const hasMetrics = [...keys.values()].flat().some((one) => !one.isUse);
    note.textContent = problem || hasMetrics
      ? problem
      : 'There are no metrics yet. Tasks print them as lines of JSON, such as {"step": 1, "loss": 0.5}.';
    const shown = [...keys]
      .filter(([, series]) => series.some((one) => one.points.length))
      .sort((a, b) => PACE.has(a[0]) - PACE.has(b[0]) || (a[1][0].order ?? 0) - (b[1][0].order ?? 0));
    useHead.hidden = !shown.some(([, [first]]) => first.isUse);
    for (const [key, series] of shown) {
      const { isUse, kind } = series[0];
      if (!charts.has(key)) charts.set(key, chart(key, isUse ? use : grid, BYTES.test(kind ?? key) ? bytes : amount));
      charts.get(key).show(series, runs.size > 1, isUse ? 'time' : axis, isLog, isUse);
    }
    render(pace, rankTimes(runs.get(workflow)));
  }
  return { element, update, redraw, destroy: () => charts.forEach((one) => one.destroy()) };
}

// The mean step time of each rank over its last steps. A rank that takes more than 1.2 times the median is marked.
function rankTimes(series) {
  const times = series
    .filter((one) => one.key === 'step_s' && one.rank != null)
    .map(({ task, rank, points }) => ({
      task,
      rank,
      mean: points.slice(-20).reduce((sum, [, value]) => sum + value, 0) / Math.min(20, points.length),
    }))
    .sort((a, b) => a.rank - b.rank);
  if (times.length < 2) return [];
  const sorted = times.map((one) => one.mean).sort((a, b) => a - b),
    median = sorted[Math.floor((sorted.length - 1) / 2)],
    most = sorted.at(-1);
  return h(
    'section',
    { class: 'card' },
    h('h2', {}, 'Step time by rank'),
    h('p', { class: 'quiet' }, `Mean of the last 20 steps; the median is ${duration(median)}`),
    h(
      'ol',
      { class: 'bars' },
      times.map(({ task, rank, mean }) => {
        const isSlow = mean > 1.2 * median;
        return h(
          'li',
          { class: isSlow ? 'slow' : null },
          h('span', { class: 'who' }, `rank ${rank}`, h('span', { class: 'quiet' }, ` ${task}`)),
          h('span', { class: 'bar', 'aria-hidden': 'true' }, h('span', { style: { width: `${(100 * mean) / most}%` } })),
          h(
            'span',
            { class: 'value' },
            duration(mean),
            isSlow ? h('strong', {}, ` slow: ${(mean / median).toFixed(1)} × median`) : null,
          ),
        );
      }),
    ),
  );
}

function chart(key, grid, format) {
  const place = h('div', { class: 'plot' }),
    legend = h('ul', { class: 'legend' });
  let plot = null,
    shape = '';
  const zoom = (factor) => {
    const { min, max } = plot.scales.x,
      middle = (min + max) / 2,
      half = ((max - min) / 2) * factor;
    plot.setScale('x', { min: middle - half, max: middle + half });
  };
  const all = () => {
    const xs = plot.data[0];
    plot.setScale('x', { min: xs[0], max: xs.at(-1) });
  };
  const button = (label, text, onclick) =>
    h('button', { type: 'button', 'aria-label': `${label}: ${key}`, title: label, onclick }, text);
  const card = h(
    'section',
    { class: 'card chart', 'aria-label': key },
    h(
      'div',
      { class: 'head' },
      h('h2', {}, key),
      button('Zoom in', '+', () => zoom(0.5)),
      button('Zoom out', '−', () => zoom(2)),
      button('Show all', '⤢', all),
    ),
    place,
    legend,
  );
  grid.append(card);
  const observer = new ResizeObserver(() => plot?.setSize({ width: place.clientWidth, height: HEIGHT }));
  observer.observe(place);

  function show(series, isCompared, axis, isLog, isUse) {
    const runs = [...new Set(series.map(({ run }) => run))];
    const shown = runs.flatMap((run) =>
      series
        .filter((one) => one.run === run)
        .sort((a, b) => (a.rank ?? 0) - (b.rank ?? 0))
        .slice(0, Math.ceil(MOST_SERIES / runs.length)),
    );
    const start = new Map();
    for (const { run, points } of series) start.set(run, Math.min(start.get(run) ?? Infinity, points[0]?.[2] ?? Infinity));
    const tables = shown.map(({ run, points }) => {
      const ordered = points
        .map(([step, value, at]) => [axis === 'step' ? step : (at ?? 0) - start.get(run), value])
        .sort((a, b) => a[0] - b[0]);
      return [ordered.map((one) => one[0]), ordered.map((one) => (isLog && one[1] <= 0 ? null : one[1]))];
    });
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const names = shown.map(({ run, task, rank, label }) =>
      [isCompared ? run : '', label ?? (rank == null ? task : `rank ${rank}`)].filter(Boolean).join(' · '),
    );
    const last = shown.map(({ points }) => points.at(-1)?.[1]);
    place.setAttribute('role', 'img');
    place.setAttribute(
      'aria-label',
      `${key}: ${names
        .map((name, index) => `${name} ${format(last[index])}`)
        .slice(0, 8)
        .join(', ')}`,
    );
    // The series of one run get the eight colors in turn. If runs are compared, each run has one color.
    const colors = shown.map(({ run }, index) => (isCompared ? runs.indexOf(run) : index) % COLORS);
    const entry = (name, color, value) =>
      h('li', {}, h('span', { class: `key c${color}`, 'aria-hidden': 'true' }), `${name} `, h('b', {}, value));
    const rangeOf = (run) => {
      const values = last.filter((one, index) => one != null && shown[index].run === run),
        [least, most] = [Math.min(...values), Math.max(...values)].map(format);
      return !values.length ? '' : least === most ? least : `${least} – ${most}`;
    };
    legend.replaceChildren(
      ...(isCompared
        ? runs.map((run, index) => entry(run, index % COLORS, rangeOf(run)))
        : names.map((name, index) => entry(name, colors[index], format(last[index])))),
      ...(series.length > shown.length ? [h('li', {}, `and ${series.length - shown.length} more`)] : []),
    );
    if (plot && shape === names.join('\n')) {
      const xs = plot.data[0],
        { min, max } = plot.scales.x,
        isWhole = !xs.length || (min <= xs[0] && max >= xs.at(-1));
      plot.setData(data, isWhole);
      if (!isWhole) plot.setScale('x', { min, max });
      return;
    }
    shape = names.join('\n');
    plot?.destroy();
    const style = getComputedStyle(document.documentElement),
      color = (name) => style.getPropertyValue(name).trim();
    const axes = {
      stroke: color('--muted'),
      grid: { stroke: color('--line'), width: 1 },
      ticks: { stroke: color('--line'), width: 1, size: 4 },
      font: '11px system-ui, sans-serif',
    };
    plot = new uPlot(
      {
        width: Math.max(200, place.clientWidth),
        height: HEIGHT,
        legend: { show: false },
        padding: [8, 12, 0, 0],
        cursor: { sync: { key: axis }, drag: { x: true, y: false }, points: { size: 6 } },
        scales: {
          x: { time: false, range: (_, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) },
          y: isLog ? { distr: 3 } : isUse ? { range: (_, __, max) => uPlot.rangeNum(0, max || 1, 0.1, true) } : {},
        },
        series: [
          {},
          ...names.map((label, index) => ({
            label,
            stroke: color(`--c${colors[index]}`),
            width: 1.75,
            spanGaps: true,
            points: { show: tables[index][0].length < 3, size: 5 },
          })),
        ],
        axes: [
          {
            ...axes,
            size: 28,
            incrs: axis === 'step' ? undefined : TIME_STEPS,
            values: (_, values) => values.map((one) => (axis === 'step' ? amount(one) : duration(one))),
          },
          {
            ...axes,
            size: 58,
            incrs: format === bytes ? POWERS_OF_2 : undefined,
            values: (_, values) => values.map((one) => (one == null ? '' : format(one))),
          },
        ],
        hooks: {
          setScale: [
            (self, name) => {
              if (name === 'x') Object.assign(card.dataset, { min: self.scales.x.min, max: self.scales.x.max });
            },
          ],
        },
      },
      data,
      place,
    );
  }
  return {
    show,
    destroy: () => {
      observer.disconnect();
      plot?.destroy();
    },
  };
}
