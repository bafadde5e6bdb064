"""Programs that look up names, for tasks that look up ``{{host:<task>}}``.

In OSMO ``{{host:<task>}}`` is a DNS name; here it is an address. OSMO's specs pass it to ``nslookup``, ``getent hosts``,
``dig`` or ``host``, which would look for the name of that address and find none. A task whose texts mention one of these
programs gets a script of that name at the beginning of its PATH. The script answers for the addresses of the task's group
in the format of the real program, and hands everything else to the real program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from distflow.plan.model import ATTEMPT_DIR, PLACEHOLDER, PlannedFile

__all__ = ["NAME_TOOLS", "name_tools"]

NAME_TOOLS = f"{ATTEMPT_DIR}/bin"
"""The directory of the scripts."""

_MENTION = re.compile(r"(?<![\w./{-])(nslookup|getent|dig|host)(?![\w./:=-])")

# Formats: bind9-dnsutils 9.18 (nslookup, dig, host) and glibc 2.36 (getent).
_SCRIPT = r"""#!/bin/sh
# From distflow: in this workflow the tasks of the group are known by these addresses, not by names.
addresses='ADDRESSES'
tool=${0##*/}
name='' is_short='' is_reverse=''
[ "$tool" = getent ] && [ "${1-}" != hosts ] && is_reverse=1
for word in "$@"; do
    case $word in
    +short) is_short=1 ;;
    -x | PTR | ptr | -type=[Pp][Tt][Rr] | -query=[Pp][Tt][Rr]) is_reverse=1 ;;
    -* | +* | @* | A | AAAA | a | aaaa | hosts) ;;
    *) [ -n "$name" ] || name=$word ;;
    esac
done
if [ -n "$name" ] && [ -z "$is_reverse" ]; then
    for address in $addresses; do
        [ "$name" = "$address" ] || continue
        kind=A words='has address'
        case $address in *:*) kind=AAAA words='has IPv6 address' ;; esac
        case $tool in
        nslookup) printf 'Server:\t\tdistflow\nAddress:\t127.0.0.1#53\n\nName:\t%s\nAddress: %s\n\n' "$name" "$address" ;;
        getent) printf '%-15s %s\n' "$address" "$name" ;;
        host) printf '%s %s %s\n' "$name" "$words" "$address" ;;
        dig)
            [ -n "$is_short" ] || printf ';; ANSWER SECTION:\n%s.\t\t0\tIN\t%s\t' "$name" "$kind"
            printf '%s\n' "$address"
            ;;
        esac
        exit 0
    done
fi
own=${0%/*}
set -f
IFS=:
for directory in $PATH; do
    if [ "$directory" != "$own" ] && [ -f "$directory/$tool" ] && [ -x "$directory/$tool" ]; then
        exec "$directory/$tool" "$@"
    fi
done
echo "$tool: not found on this node; distflow itself only answers for: $addresses" >&2
exit 127
"""


def name_tools(texts: Iterable[str]) -> tuple[PlannedFile, ...]:
    """Return the scripts that a task needs: none unless its texts hold a placeholder for an address and mention a program."""
    known = list(texts)
    found = (one for text in known for one in PLACEHOLDER.finditer(text) if one.group(1) in ("ADDRESS", "MASTER_ADDR"))
    addresses = sorted({one.group(0) for one in found})
    if not addresses:
        return ()
    script = _SCRIPT.replace("ADDRESSES", " ".join(addresses), 1)
    names = sorted({one.group(1) for text in known for one in _MENTION.finditer(text)})
    return tuple(
        PlannedFile(path=f"bin/{name}", shown=f"distflow's {name}", text=script, size=len(script.encode()), mode=0o700)
        for name in names
    )
