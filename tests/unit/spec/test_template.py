"""Templates: OSMO's variables and tokens, the source line of each rendered line, and the limits for hostile templates."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.documents.problems import ProblemsFound, Severity
from distflow.spec.template import render, split_defaults

DEFAULTS = "default-values:\n  n: 2\n  flag: false\n  version: 3.10\n  name: x\n"


def rendered(text: str, **options: list[tuple[str, str]]) -> str:
    return render(text, "f.yaml", sets=options.get("sets", ()), set_strings=options.get("set_strings", ())).text


def refusal(text: str, sets: list[tuple[str, str]] | None = None, limit_s: float = 5.0) -> str:
    with pytest.raises(ProblemsFound) as caught:
        render(text, "f.yaml", sets=sets or (), limit_s=limit_s)
    return str(caught.value)


def test_defaults_are_cut_out_and_their_lines_stay_blank() -> None:
    text = "a: 1\ndefault-values:\n  n: 2\n\n# why\n  m: 3\nworkflow: {}\n"
    assert split_defaults(text, "f") == ("a: 1\n\n\n\n\n\nworkflow: {}\n", "\ndefault-values:\n  n: 2\n\n# why\n  m: 3\n\n")


@pytest.mark.parametrize("line", ["{% if true %}", "{{ '' }}", "{# note #}", "---", "workflow: 1"])
def test_defaults_end_where_the_next_part_begins(line: str) -> None:
    assert split_defaults(f"default-values:\n  a: 1\n{line}\n", "f")[0] == f"\n\n{line}\n"


def test_comments_above_the_first_section_are_not_rendered() -> None:
    header = "# Run with {{ image }} and {% if x %}\n#   {# never closed\n\n# plain\n---\n"
    assert rendered(header + DEFAULTS + "x: {{ n }}") == "\n\n\n# plain\n---\n\n\n\n\n\nx: 2"
    assert "f.yaml:3: error: the variable `image`" in refusal("# {{ image }}\na: 1\n# {{ image }}\n")


def test_definitions_in_comments_above_the_first_section_are_rendered() -> None:
    assert rendered("# {% set n = 2 %}\nx: {{ n }}") == "# \nx: 2"
    assert rendered("# {{ 1 }}\n{% for n in [3] %}\nx: {{ n }}{% endfor %}").endswith("x: 3")


def test_defaults_may_be_a_flow_mapping_that_closes_at_column_0() -> None:
    assert rendered("default-values: {\n  a: 1\n}\nx: {{ a }}\n") == "\n\n\nx: 1\n"


@pytest.mark.parametrize(
    ("option", "printed"),
    [
        ("4", "4"),
        ("false", "False"),
        ("1.10", "1.10"),
        ("no", "no"),
        ("~", "~"),
        ("", ""),
        ("null", "null"),
        ("007", "007"),
        ("a=b", "a=b"),
        ("[1]", "[1]"),
        ("{{output}}", "{{output}}"),
        ("12:30:45", "12:30:45"),
        ("0x_", "0x_"),
    ],
)
def test_set_takes_a_yaml_scalar_and_prints_it_as_it_was_typed(option: str, printed: str) -> None:
    assert rendered(DEFAULTS + "x: {{ n }}", sets=[("n", option)]).endswith(f"x: {printed}")


def test_a_flag_that_is_set_to_false_is_false_and_a_string_is_not() -> None:
    text = DEFAULTS + "x: {{ 'on' if flag else 'off' }}"
    assert rendered(text, sets=[("flag", "false")]).endswith("off")
    assert render(text, "f", set_strings=[("flag", "false")]).text.endswith("on")


def test_later_options_win_and_strings_win_over_values() -> None:
    text = DEFAULTS + "x: {{ n }} {{ n is string }}"
    assert rendered(text, sets=[("n", "3"), ("n", "4")]).endswith("x: 4 False")
    assert rendered(text, sets=[("n", "3")], set_strings=[("n", "5")]).endswith("x: 5 True")


def test_numbers_print_as_written_and_still_compute() -> None:
    assert rendered(DEFAULTS + "x: {{ version }} {{ version + 1 }}").endswith("x: 3.10 4.1")


def test_a_variable_without_default_may_be_set() -> None:
    assert rendered("x: {{ new }}", sets=[("new", "1")]) == "x: 1"


def test_setting_an_unknown_variable_or_a_token_is_refused() -> None:
    message = refusal(DEFAULTS + "x: {{ n }}", [("vesrion", "1"), ("output", "1")])
    assert "--set: error: the spec has no variable `vesrion`\n    did you mean `version`?" in message
    assert "`output` cannot be set" in message
    assert "add it to its `default-values`" in refusal("x: 1", [("a", "1")])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{output}}", "{{output}}"),
        ("{{ output }}", "{{output}}"),
        ("{{uuid}}{{ workflow_id}}", "{{uuid}}{{workflow_id}}"),
        ("{{host:master}} {{ host: w-1 }}", "{{host:master}} {{host:w-1}}"),
        ("{{input:0}}", "{{input:0}}"),
        ("{{rank_offset}} {{ master_addr }}", "{{rank_offset}} {{master_addr}}"),
        ("{% raw %}{{output}}{% endraw %}", "{{output}}"),
        ("{{ '{{host:w-' ~ n ~ '}}' }}", "{{host:w-2}}"),
        ("{% set x = '{{output}}/a' %}{{ x }}", "{{output}}/a"),
        ("{{ '{{' }}", "{{"),
    ],
)
def test_rendering_keeps_tokens(written: str, expected: str) -> None:
    assert rendered(f"default-values: {{n: 2}}\nx: {written}\ny: {{{{ n }}}}") == f"\nx: {expected}\ny: 2"


def test_a_variable_of_the_spec_wins_over_a_rank_token() -> None:
    assert rendered("default-values: {world_size: 16}\nx: {{world_size}} {{node_rank}}") == "\nx: 16 {{node_rank}}"
    assert rendered("x: {{ world_size }}", sets=[("world_size", "8")]) == "x: 8"
    assert rendered("{% for node_rank in [0, 1] %}{{ node_rank }}{% endfor %}") == "01"
    assert rendered("{% set num_nodes = 2 %}{{ num_nodes }}") == "2"


def test_a_default_that_can_have_no_effect_is_a_warning() -> None:
    problems = render("default-values:\n  output: 1\n  a-b: 2\nx: {{output}}", "f.yaml").problems
    assert [(problem.where.line, problem.severity) for problem in problems] == [(2, Severity.WARNING), (3, Severity.WARNING)]


def test_every_undefined_variable_is_named_with_its_line() -> None:
    message = refusal(
        "a: {{ one }}\nb: {{ two.x }}\nc: {{ three | default(1) }}\nd: {% if four is defined %}{{ four }}{% endif %}"
    )
    assert "f.yaml:1: error: the variable `one`" in message
    assert "f.yaml:2: error: the variable `two`" in message
    assert "three" not in message
    assert "four" not in message


def test_the_error_about_a_token_inside_an_expression_has_the_remedy() -> None:
    assert "`{{output}}` is a token of distflow: write it outside" in refusal("a: {{ output ~ '/x' }}")


def line_of_each(text: str) -> list[tuple[str, int]]:
    found = render(text, "f.yaml")
    lines = found.text.split("\n")
    line_map = found.line_map or tuple(range(1, len(lines) + 1))
    assert len(line_map) == len(lines)
    return list(zip(lines, line_map, strict=True))


def test_lines_are_known_after_loops_conditions_and_trimming() -> None:
    text = (
        "a\n{%- for i in range(2) %}\n- {{ i }}\n  b\n{%- endfor %}\n"
        "{# two\nlines #}\n{% if true -%}\n   c\n{%- endif %}\n{{ 'd\\ne' }}\nf"
    )
    assert line_of_each(text) == [
        ("a", 1),
        ("- 0", 3),
        ("  b", 4),
        ("- 1", 3),
        ("  b", 4),
        ("", 7),
        ("c", 9),
        ("d", 11),
        ("e", 11),
        ("f", 12),
    ]


def test_line_marks_do_not_change_the_values_in_a_template() -> None:
    text = "{% set x %}a\nb{% endset %}\n{{ x == 'a\\nb' }} {{ x | length }}\n{% macro m() %}q{% endmacro %}{{ m() == 'q' }}"
    assert rendered(text) == "\nTrue 3\nTrue"


def test_private_use_characters_are_kept() -> None:
    assert rendered("\U000f0000t0\U000f0001 {{ 1 }} \ue0b0") == "\U000f0000t0\U000f0001 1 \ue0b0"


PIECES = st.lists(
    st.sampled_from(
        [
            "{% if true %}",
            "{%- if true -%}",
            "{# x\ny #}",
            "{{ 1 }}",
            "{{- 2 -}}",
            "\n",
            "\n\n",
            "  ",
            "{% raw %}{{ }}{% endraw %}",
        ]
    ),
    max_size=14,
)


@settings(max_examples=150)
@given(PIECES)
def test_every_word_of_a_template_is_found_in_its_line(pieces: list[str]) -> None:
    text = "".join(f"{piece}w{number:02}" for number, piece in enumerate(pieces))
    text += "{% endif %}" * sum("if true" in piece for piece in pieces)
    source = text.split("\n")
    found = line_of_each(text)
    assert sum(content.count("w") for content, _ in found) == len(pieces)
    for content, line in found:
        words = re.findall("w[0-9]{2}", content)
        if words:
            assert words[0] in source[line - 1]


@settings(max_examples=100)
@given(st.text("ab{}%#\n '\"", max_size=30))
def test_any_text_is_rendered_without_line_marks_or_refused(text: str) -> None:
    with contextlib.suppress(ProblemsFound):
        assert "\U000f0000" not in render(text, "f.yaml").text


@pytest.mark.parametrize(
    "expression",
    [
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**9 }}",
        "{{ (10**100)**(10**3) }}",
        "{{ 'a'.ljust(10**8) }}",
        "{{ 'a' | center(100000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=1000000000) }}",
        "{{ '{0[x]:{0[w]}}'.format({'x': 1, 'w': 200000}) }}",
        "{{ '{x:{w[0]}}'.format_map({'x': 1, 'w': [200000]}) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ ('a' * 1000000) | replace('', 'b' * 1000000) }}",
        "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
        "{{ ('a' * 4000).join('b' * 4000) }}",
        "{{ ('b' * 4000) | join('a' * 4000) }}",
        "{{ ('a\\n' * 100000) | indent(90000) }}",
        "{{ range(999999) | list }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaa{% endfor %}{% endfor %}",
    ],
)
def test_no_value_grows_without_bound(expression: str) -> None:
    begun = time.process_time()
    message = refusal(expression, limit_s=60)
    assert "too large" in message or "larger than 4 MiB" in message
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in 'a' * 99999 %}{% for j in 'a' * 99999 %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% set x = range(9999) | map('string') | map('upper') | list %}{% endfor %}",
    ],
)
def test_no_template_runs_past_its_deadline(template: str) -> None:
    begun = time.process_time()
    assert "takes more than 0.2 s of CPU time" in refusal(template, limit_s=0.2)
    assert time.process_time() - begun < 5


def test_a_large_number_that_is_not_a_width_may_be_formatted() -> None:
    text = "{{ '{{x: {d[n]}, {d[w]:3}'.format(d={'n': 5000000, 'w': 1}) }}"
    assert render(text, "f.yaml").text == "{x: 5000000,   1"


def test_every_iteration_of_a_loop_checks_the_clock() -> None:
    from jinja2.exceptions import SecurityError

    from distflow.spec.jinja import BoundedEnvironment

    ticks = itertools.count()
    environment = BoundedEnvironment(limit_s=100, delimiters=None, clock=lambda: next(ticks))
    template = environment.from_string(environment.bounded(environment.parse("{% for i in range(99999) %}{% endfor %}")))
    with pytest.raises(SecurityError, match="takes more than"):
        template.render()
    assert next(ticks) < 110


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("\n{{ ''.__class__ }}", "f.yaml:2: error: the template does something that is not allowed"),
        ("{{ 1 / 0 }}", "f.yaml:1: error: the template fails: ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "the template fails: TypeError"),
        ("{{ {}.x }}", "'dict object' has no attribute 'x'"),
        ("{% include 'x' %}", "the template fails"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "nested too deeply"),
        ("{% for i in [1] %}" * 40 + "{% endfor %}" * 40, "nested too deeply"),
        ("{{ dict(a=1, a=2) }}", "the template is not valid, is nested too deeply or needs too much memory: keyword argument"),
        ("{{ 1 }}" * 20_001, "has 20001 tags"),
        ("\n{{ a b }}", "f.yaml:2: error: the template is not valid"),
        ("\necho ${#x[@]}", "f.yaml:2: error: the template is not valid: missing end of comment tag"),
    ],
)
def test_each_failure_of_a_template_is_explained(template: str, words: str) -> None:
    assert words in refusal(template)


def test_a_text_without_template_does_not_import_jinja() -> None:
    program = (
        "import sys; from distflow.spec.template import render;"
        "render('default-values: {a: 1}\\nx: {{host:m}} {{ world_size }}', 'f');"
        "print(sorted({'jinja2', 'jsonschema'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
