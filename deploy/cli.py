"""The `tokenyard` command line. The flags of `serve` are made from shared/settings.py, their one source."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import setproctitle

from deploy.bench import flags as bench
from deploy.bench.names import KEY_VARIABLE
from deploy.chat import chat
from deploy.doctor import doctor
from deploy.serve import serve
from shared.access_keys import with_digests
from shared.settings import GUARDS, KINDS, SECRETS, Settings, SettingsError
from shared.settings_sources import CONFIG_VARIABLE, ENV_PREFIX, Resolved, config_file, resolve

_USAGE_ERROR = 2
# Settings that are lists of one flag each, and the form of an entry.
_REPEATED = {"also": "NAME=MODEL", "lora": "NAME=FOLDER", "lora_dirs": "DIR", "weights_dirs": "DIR"}
_SERVE_EXAMPLES = f"""\
examples:
  tokenyard serve                                  the embedded demo model, on http://127.0.0.1:8000
  tokenyard serve Qwen/Qwen3-0.6B --port 9000      a model from the Hugging Face hub
  tokenyard serve ./my-model --devices cpu,cpu     a folder, two workers that share the cores
  tokenyard serve ./chat --also embed=./embedder   two models on one port, chosen by the request's `model`
  tokenyard serve ./my-model --lora sql=./my-lora  an adapter, chosen by the request's `model`
  tokenyard serve ./my-model --host 0.0.0.0        reachable from the network
  TOKENYARD_MAX_RUNNING=32 tokenyard serve         a setting from the environment
  tokenyard serve --print-settings > my.toml       a file to edit, then: tokenyard serve --config my.toml

precedence: command line, then {ENV_PREFIX}* variables, then the --config file, then defaults.
signals: SIGTERM or Ctrl-C stops in order (running requests finish first), a second Ctrl-C at once;
         SIGHUP reads keys and certificates again, and replaces API processes one by one: no request is lost.
exit status: 0 after a signal, 1 when a process could not be kept alive, 2 for a setting that cannot work.
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = read(sys.argv[1:] if argv is None else argv)
    try:
        status: int = arguments.run(arguments)
    except SettingsError as error:
        print(f"tokenyard: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except BrokenPipeError:
        # The reader of our output, `head` say, has what it wanted. Python flushes once more at exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Reads a command line. SystemExit where it is none, or asks for help."""
    given = list(argv)
    return _parser().parse_args([bench.PLOT, *given[2:]] if given[:2] == ["bench", "plot"] else given)


class _Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviated flags: a short form can mean something else in the next version."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tokenyard", description="Serves language models over HTTP. `tokenyard COMMAND --help` explains a command."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_chat(commands)
    _add_worker(commands)
    _add_top(commands)
    bench.add(commands)
    _add_ray(commands)
    _add_inquiries(commands)
    diagnose = commands.add_parser("doctor", help="check this machine, and say what to do")
    diagnose.add_argument("--port", type=int, default=8000, help="port that a server would use (default: 8000)")
    diagnose.set_defaults(run=lambda arguments: doctor(arguments.port))
    commands.add_parser("version", help="print the version").set_defaults(run=_version)
    return parser


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Starts a scheduler, one worker per device and the API processes, and keeps them running.",
        epilog=_SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help=f"settings file [{CONFIG_VARIABLE}]")
    parser.add_argument("--print-settings", action="store_true", help="print the effective settings and exit")
    groups: dict[str, Any] = {}
    for setting in dataclasses.fields(Settings):
        name = setting.metadata["group"]
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        _add_setting(group, setting)
    parser.set_defaults(run=_serve)


def _add_setting(group: Any, setting: dataclasses.Field[Any]) -> None:
    text = setting.metadata["help"].replace("%", "%%")
    shown = "" if setting.default in ("", None) else f"default {_shown(setting.default)}; "
    options: dict[str, Any] = {"help": f"{text} [{shown}{ENV_PREFIX}{setting.name.upper()}]"}
    kind = KINDS[setting.name]
    if setting.name == "model":
        group.add_argument("model", nargs="?", metavar="MODEL", **options)
    elif setting.name in _REPEATED:
        group.add_argument(_flag(setting.name), action="append", metavar=_REPEATED[setting.name], **options)
    elif kind is bool:
        group.add_argument(_flag(setting.name), action=argparse.BooleanOptionalAction, **options)
    else:
        metavar = {int: "N", str: "TEXT"}[kind]
        group.add_argument(_flag(setting.name), type=kind, metavar=metavar, **options)


def _add_worker(commands: Any) -> None:
    keys = commands.add_parser("keys", help="make the keys with which workers of other machines join")
    keys.add_argument("folder", type=Path, metavar="FOLDER", help="where the server's keys are, or will be")
    keys.add_argument("--peer", default="", metavar="NAME", help="put one more machine on the allow-list")
    keys.set_defaults(run=_keys)
    parser = commands.add_parser(
        "worker",
        help="join a server on another machine with a device of this one",
        description="Starts one worker and keeps it running. MODEL must be the model of that server.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("endpoint", metavar="tcp://ADDRESS:PORT", help="the server's --worker-endpoint")
    parser.add_argument(
        "--index",
        type=int,
        default=None,
        help="number of this worker (default: the server gives it one); a second machine that is started with the same "
        "number stands by until the first has gone",
    )
    group = parser.add_argument_group(
        "a group of ranks on several hosts",
        "docs/groups.md. One `worker` on each host, with the same keys and settings; what is left out of these three "
        "is read from LWS_GROUP_SIZE, LWS_WORKER_INDEX and LWS_LEADER_ADDRESS, as a LeaderWorkerSet sets them.",
    )
    group.add_argument("--nodes", type=int, default=None, metavar="N", help="hosts whose ranks are one worker")
    group.add_argument("--node", type=int, default=None, metavar="N", help="number of this host, from 0")
    group.add_argument(
        "--rendezvous",
        default=None,
        metavar="HOST:PORT",
        help="where the ranks meet: an address of host 0; without HOST that of LWS_LEADER_ADDRESS",
    )
    for setting in dataclasses.fields(Settings):
        wanted = setting.metadata["group"] in ("model", "capacity") or setting.name in ("curve_keys", "log_level")
        if wanted and setting.name not in _REPEATED:
            _add_setting(parser, setting)
    parser.set_defaults(run=_worker)


def _add_ray(commands: Any) -> None:
    orders = commands.add_parser("ray", help="serve with the nodes of a Ray cluster").add_subparsers(required=True)
    parser = orders.add_parser(
        "up",
        help="start a server here, and its workers on the cluster's nodes",
        description="Connects to the cluster of RAY_ADDRESS (or of this machine), starts a server without a device "
        "here, and keeps its workers running on the nodes. MODEL must be readable there.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="workers of one device each (default: 1)")
    parser.add_argument("--cpus", type=int, default=4, metavar="N", help="cores of each worker (default: 4)")
    parser.add_argument("--gpus-per-worker", type=int, default=0, metavar="N", help="GPUs of each, 0 or 1 (default: 0)")
    for setting in dataclasses.fields(Settings):
        if setting.name not in ("devices", "curve_keys", "also"):
            _add_setting(parser, setting)
    parser.set_defaults(run=_ray_up)


def _add_inquiries(commands: Any) -> None:
    status = commands.add_parser("status", help="show the processes, queues and last crashes of the running servers")
    status.add_argument("--json", action="store_true", help="as JSON, a list of servers")
    status.set_defaults(run=_status)
    why = commands.add_parser("why", help="show what was decided about one request, when and why")
    why.add_argument("request_id", metavar="REQUEST_ID", help="the answer's x-request-id, or how it begins")
    why.set_defaults(run=_why)
    for parser in (status, why):
        parser.add_argument("--run-dir", type=Path, metavar="DIR", help="of one server (default: all that you may ask)")


def _status(arguments: argparse.Namespace) -> int:
    from deploy.status import status

    return status(arguments.run_dir, arguments.json)


def _why(arguments: argparse.Namespace) -> int:
    from deploy.status import why

    return why(arguments.run_dir, arguments.request_id)


def _keys(arguments: argparse.Namespace) -> int:
    # ZeroMQ takes a while to import, and most commands do without.
    from deploy.remote_worker import make_keys

    return make_keys(arguments.folder, arguments.peer)


def _worker(arguments: argparse.Namespace) -> int:
    from deploy.nodes import nodes_of
    from deploy.remote_worker import work

    nodes = nodes_of(arguments.nodes, arguments.node, arguments.rendezvous, os.environ)
    flags = {name: value for name, value in vars(arguments).items() if name in KINDS}
    return work(resolve(flags, os.environ).settings, arguments.endpoint, arguments.index, nodes)


def _add_top(commands: Any) -> None:
    parser = commands.add_parser("top", help="watch a running server: requests, tokens, KV cache, queue, workers")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument("--api-key", default="", metavar="KEY", help=f"key of the server [{KEY_VARIABLE}]")
    parser.add_argument("--every", type=_seconds, default=1.0, metavar="S", help="seconds between frames (default: 1)")
    parser.add_argument("--once", action="store_true", help="print the figures once, and leave")
    parser.set_defaults(run=_top)


def _seconds(text: str) -> float:
    if not 0.1 <= (value := float(text)) <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0.1 to 3600, got {text}")
    return value


def _top(arguments: argparse.Namespace) -> int:
    from deploy.top import top

    key = arguments.api_key or os.environ.get(KEY_VARIABLE, "")
    if arguments.api_key:
        setproctitle.setproctitle("tokenyard top (arguments hidden: they had a key)")
    return top(arguments.url, key, arguments.every, arguments.once)


def _ray_up(arguments: argparse.Namespace) -> int:
    from deploy.ray_cluster import Wanted, up

    wanted = Wanted(arguments.workers, arguments.cpus, arguments.gpus_per_worker)
    settings = resolve(_typed(arguments), os.environ, config_file()).settings
    _forget_secrets(arguments)
    return up(settings, wanted)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk to a running server in the terminal")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument("--model", default="", help="model name (default: the first one the server names)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message that opens each conversation")
    parser.add_argument("--api-key", default="", metavar="KEY", help=f"key of the server [{KEY_VARIABLE}]")
    parser.add_argument("--cacert", default="", metavar="FILE", help="PEM file with authorities to trust, for https")
    parser.set_defaults(run=_chat)


def _chat(arguments: argparse.Namespace) -> int:
    key = arguments.api_key or os.environ.get(KEY_VARIABLE, "")
    if arguments.api_key:
        setproctitle.setproctitle("tokenyard chat (arguments hidden: they had a key)")
    return chat(arguments.url, arguments.model, arguments.system, key, arguments.cacert)


def _serve(arguments: argparse.Namespace) -> int:
    flags = _typed(arguments)
    environ = dict(os.environ)
    config = getattr(arguments, "config", None) or config_file()
    resolved = resolve(flags, environ, config)
    if "print_settings" in arguments:
        print(settings_as_toml(resolved))
        return 0
    _forget_secrets(arguments)
    return serve(resolved.settings, lambda: resolve(flags, environ, config).settings)


def _typed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were typed, by name."""
    flags = {name: value for name, value in vars(arguments).items() if name in KINDS}
    return flags | {name: ",".join(flags[name]) for name in _REPEATED.keys() & flags.keys()}


def _forget_secrets(arguments: argparse.Namespace) -> None:
    """Take keys out of what `ps` shows and children inherit."""
    inherited = {ENV_PREFIX + name.upper() for name in SECRETS} & os.environ.keys()
    typed = SECRETS & vars(arguments).keys()
    if not typed and not inherited:
        return
    # The kernel shows the environment that a process was started with. A title is written over it as far as it reaches,
    # as long as no variable has been taken out of it.
    setproctitle.setproctitle(" " * _size_of_environment())
    shown = "tokenyard serve (arguments hidden: they had a key)" if typed else " ".join(sys.orig_argv)
    setproctitle.setproctitle(shown)
    for name in inherited:
        del os.environ[name]


def _size_of_environment() -> int:
    try:
        return sum(len(Path("/proc/self", name).read_bytes()) for name in ("cmdline", "environ"))
    except OSError:
        return 0


def settings_as_toml(resolved: Resolved) -> str:
    """Write a file for `--config` with the effective values, each with its source; keys only as their digests."""
    hidden = with_digests(dataclasses.replace(resolved.settings, api_key_file=""))
    values = dataclasses.asdict(resolved.settings) | {name: getattr(hidden, name) for name in SECRETS}
    lines = [
        (f"# {name} =" if value is None or (value == "" and name in GUARDS) else f"{name} = {_toml(value)}", name)
        for name, value in values.items()
    ]
    width = max(len(line) for line, _ in lines)
    return "\n".join(f"{line:{width}}  # {resolved.sources[name]}" for line, name in lines)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else _toml(value)


def _toml(value: Any) -> str:
    """Write a value in TOML. Texts, whole numbers and truth values look as in JSON, but for DEL, which TOML wants
    escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _version(_: argparse.Namespace) -> int:
    try:
        version = importlib.metadata.version("tokenyard")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed: run from its source folder)"
    print(f"tokenyard {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
