// The frame of the page: its header, its theme, its keyboard shortcuts, and the choice of a page by the URL.

import { freeze, h, render, withCode } from './dom.js';
import { poolsPage, workflowsPage } from './lists.js';
import { get, report } from './source.js';
import { workflowPage } from './workflow.js';

const root = document.documentElement;
if (report) freeze(report.made_at);
let page = null,
  about = { actions: false };
try {
  root.dataset.theme = localStorage.getItem('distflow-theme') ?? '';
} catch {
  /* a browser may forbid the storage */
}

const isDark = () => (root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches);
const theme = h(
  'button',
  {
    type: 'button',
    class: 'theme',
    'aria-label': 'Switch between light and dark',
    title: 'Light or dark',
    onclick: () => {
      root.dataset.theme = isDark() ? 'light' : 'dark';
      try {
        localStorage.setItem('distflow-theme', root.dataset.theme);
      } catch {
        /* as above */
      }
      page?.redraw?.();
    },
  },
  '◐',
);
const links = report
  ? []
  : [
      ['#/', 'Workflows'],
      ['#/pools', 'Pools'],
    ].map(([href, name]) => h('a', { href }, name));
const main = h('main', { id: 'main', tabindex: '-1' });
render(
  document.body,
  h(
    'header',
    { class: 'top' },
    h(
      'a',
      {
        class: 'skip',
        href: '#main',
        onclick: (event) => {
          event.preventDefault();
          main.focus();
        },
      },
      'Skip to the content',
    ),
    report ? h('span', { class: 'brand' }, 'distflow') : h('a', { class: 'brand', href: '#/' }, 'distflow'),
    h('nav', { 'aria-label': 'Pages' }, links),
    h('span', { class: 'grow' }),
    report ? h('span', { class: 'quiet' }, `Report of ${report.made}`) : null,
    theme,
  ),
  h(
    'p',
    { class: 'offline-note', role: 'status' },
    withCode('The connection is lost. If the server has ended, run `distflow ui` again.'),
  ),
  main,
);

function route() {
  const [path, search] = location.hash.replace(/^#\/?/, '').split('?');
  const [kind, id, section] = path.split('/').map(decodeURIComponent),
    query = Object.fromEntries(new URLSearchParams(search ?? ''));
  page?.close?.();
  for (const link of links)
    link.setAttribute('aria-current', (link.hash === '#/pools') === (kind === 'pools') ? 'page' : 'false');
  if (report) page = report.problems ? problemsPage() : workflowPage(main, report.workflow, section ?? 'overview', query, about);
  else if (kind === 'pools') page = poolsPage(main);
  else if (kind === 'workflows' && id) page = workflowPage(main, id, section ?? 'overview', query, about);
  else page = workflowsPage(main, query);
  page.ready?.then(() => {
    root.dataset.ready = location.hash;
  });
  scrollTo(0, 0);
}

function problemsPage() {
  document.title = 'Failed · distflow';
  render(
    main,
    h('header', { class: 'title' }, h('h1', {}, withCode('`distflow workflow submit` failed'))),
    report.problems.map((one) =>
      h(
        'section',
        { class: 'card cause' },
        h('p', {}, h('b', {}, [one.file, one.line].filter(Boolean).join(':'))),
        h('p', {}, withCode(one.message)),
        one.hint ? h('p', { class: 'remedy' }, withCode(one.hint)) : null,
      ),
    ),
  );
  return { ready: Promise.resolve() };
}

addEventListener('hashchange', route);
addEventListener('keydown', (event) => {
  const isTyping = event.target.closest?.('input, select, textarea, dialog');
  if (event.key === '/' && !isTyping && !event.ctrlKey && !event.metaKey) {
    const field = document.querySelector('[data-focus]');
    if (field) {
      event.preventDefault();
      field.focus();
      field.select();
    }
  } else if (event.key === 'Escape' && isTyping) event.target.blur?.();
});
get('about')
  .then((found) => {
    about = found;
  })
  .catch(() => {})
  .finally(route);
