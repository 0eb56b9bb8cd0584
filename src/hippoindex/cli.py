"""The command line. Every command is a thin layer over ``hippoindex.pipeline``.

Exit codes: 0 done, 1 finished but a threshold was not met, 2 wrong usage or input, 3 the work was stopped by
something else, 130 or 143 interrupted by a signal.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import traceback
from contextlib import closing
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hippoindex._version import __version__
from hippoindex.errors import HippoIndexError, InterruptedRunError, ThresholdError, UsageError

if TYPE_CHECKING:
    from hippoindex.pipeline.build import BuildResult

app = typer.Typer(
    help="Turn a corpus of passages into a HippoRAG index, and answer evaluation sets against it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 a threshold was not met, 2 wrong usage or input, 3 stopped by an error.",
)
models_app = typer.Typer(help="The two small models of the embedded default.", no_args_is_help=True)
app.add_typer(models_app, name="models")


class ExecutorName(StrEnum):
    """Where sharded stages run."""

    auto = "auto"
    local = "local"
    ray = "ray"


class ExportFormat(StrEnum):
    """What ``hippoindex export`` writes."""

    hipporag = "hipporag"
    faiss = "faiss"
    graphml = "graphml"
    neo4j_csv = "neo4j-csv"
    parquet_edges = "parquet-edges"


class ParityName(StrEnum):
    """Whose code to follow where it differs from the paper."""

    hipporag1 = "hipporag1"
    hipporag2 = "hipporag2"


class LogLevel(StrEnum):
    """Least level of log lines on standard error."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


IndexOption = Annotated[
    str, typer.Option("--index", help="Folder of the index, or s3://bucket/prefix.", show_default=False)
]
IndexArgument = Annotated[
    str, typer.Argument(help="Folder of the index, or s3://bucket/prefix.", show_default=False)
]
QueriesOption = Annotated[
    Path,
    typer.Option(
        "--queries",
        help="Questions: JSON Lines {id, question, gold, answer, answer_aliases, named_entities}, or JSON of "
        "HippoRAG, MuSiQue, HotpotQA or 2WikiMultiHopQA.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. synonyms.threshold=0.85. Repeatable."
    ),
]
SetQuestionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of retrieve.* or reader.*, e.g. retrieve.damping=0.7. Repeatable.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ExecutorOption = Annotated[ExecutorName | None, typer.Option(help="Where stages run. \\[default: auto]")]
WorkersOption = Annotated[int | None, typer.Option(help="Parallel workers. \\[default: one per core]")]
AddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ray cluster to run on: HOST:PORT, ray://HOST:PORT or auto. Implies --executor ray.",
        show_default=False,
    ),
]
PrecomputeOption = Annotated[
    bool,
    typer.Option(
        "--precompute/--no-precompute",
        help="Solve the passages' part of PPR anew, or leave that to `hippoindex precompute`.",
    ),
]
MaxUsdOption = Annotated[
    float | None,
    typer.Option(
        help="Stop before a paid endpoint has cost more US dollars than this; needs extract.price_usd.",
        show_default=False,
    ),
]
AllowMissingOption = Annotated[
    bool,
    typer.Option("--allow-missing", help="Count gold passages that are not in the index as never found."),
]
StrictOption = Annotated[
    bool,
    typer.Option("--strict", help="Exit with 1 if fewer synonyms were found than synonyms.target_recall."),
]


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file whose sections retrieve, as `hippoindex tune` writes it, and reader are used.",
    ),
]
ParityOption = Annotated[
    ParityName | None,
    typer.Option(help="Follow the authors' code where it differs from the paper.", show_default=False),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hippoindex {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    log_level: Annotated[
        LogLevel, typer.Option(help="Least level of log lines on standard error.")
    ] = LogLevel.info,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON.")] = False,
    version: Annotated[  # noqa: ARG001 - typer acts on it through the callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    from hippoindex.pipeline.progress import configure_logging

    configure_logging(log_level.value, as_json=log_json)


@app.command()
def index(
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            help="Passages: a file (.jsonl, .json, .csv, .parquet; .gz), a folder or a glob; also s3://. "
            "Repeatable.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(help="Folder that becomes the index, or s3://bucket/prefix.", show_default=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings, e.g. configs/laptop.yaml.")
    ] = None,
    overrides: SetOption = None,
    executor: ExecutorOption = None,
    workers: WorkersOption = None,
    address: AddressOption = None,
    max_quarantine_rate: Annotated[
        float | None,
        typer.Option(help="Share of passages that may fail before the job does. \\[default: 0.01]"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an index that is at --output.")
    ] = False,
    parity: ParityOption = None,
    max_usd: MaxUsdOption = None,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Build an index: read, chunk, extract, resolve, embed, synonyms, graph, precompute, words, publish."""
    from hippoindex.pipeline.build import build_index
    from hippoindex.pipeline.config import load_config
    from hippoindex.pipeline.parity import index_settings, retrieve_settings

    as_theirs = [*index_settings(), *retrieve_settings(parity.value)] if parity else []
    settings = load_config(
        config,
        [*as_theirs, *(overrides or ())],
        corpus__path=corpus or None,
        output=output,
        cluster__executor=executor.value if executor else None,
        cluster__workers=workers,
        cluster__address=address,
        max_quarantine_rate=max_quarantine_rate,
        extract__max_usd=max_usd,
    )
    _show_build(build_index(settings, overwrite=overwrite, strict=strict), as_json)


@app.command()
def append(
    index: IndexOption,
    corpus: Annotated[
        list[str], typer.Option(help="New passages, as for `hippoindex index`.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="corpus.*, cluster.*, or where the extractor is, e.g. extract.path=new.json. An index "
            "keeps the settings that decide what is in it.",
        ),
    ] = None,
    executor: ExecutorOption = None,
    workers: WorkersOption = None,
    address: AddressOption = None,
    max_quarantine_rate: Annotated[
        float | None,
        typer.Option(help="Share of new passages that may fail before the job does. \\[default: 0.01]"),
    ] = None,
    precompute: PrecomputeOption = True,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Add passages to an index; it is then as if built from all of them."""
    from hippoindex.pipeline.update import append as append_to

    result = append_to(
        index,
        corpus,
        overrides or (),
        precompute=precompute,
        strict=strict,
        cluster__executor=executor.value if executor else None,
        cluster__workers=workers,
        cluster__address=address,
        max_quarantine_rate=max_quarantine_rate,
    )
    if result is not None:
        _show_build(result, as_json)
    elif as_json:
        _print_json({"index": str(index), "changed": False})
    else:
        typer.echo(f"{index} holds all of it already: nothing was changed")


@app.command()
def delete(
    index: IndexOption,
    ids: Annotated[
        Path, typer.Option(help="File with the ids of documents, one a line.", show_default=False)
    ],
    executor: ExecutorOption = None,
    workers: WorkersOption = None,
    address: AddressOption = None,
    precompute: PrecomputeOption = True,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove documents from an index; it is then as if built without them."""
    from hippoindex.pipeline.update import delete as delete_from
    from hippoindex.pipeline.update import read_ids

    result = delete_from(
        index,
        read_ids(ids),
        precompute=precompute,
        strict=strict,
        cluster__executor=executor.value if executor else None,
        cluster__workers=workers,
        cluster__address=address,
    )
    _show_build(result, as_json)


@app.command()
def precompute(
    directory: IndexArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="precompute.* or retrieve.damping, e.g. retrieve.damping=0.85."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Solve the passages' part of PPR anew, for another damping or type; the index is replaced at once."""
    from hippoindex.pipeline.display import record_table
    from hippoindex.pipeline.precompute import refresh

    made = refresh(directory, overrides or ())
    if as_json:
        _print_json(made)
    else:
        Console().print(record_table(made))


@app.command()
def retrieve(
    index: IndexOption,
    queries: QueriesOption,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File to write, JSON Lines or .parquet; without it the terminal.", show_default=False
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="bm25, dense, hipporag1, hipporag2 or hippoindex. \\[default: the index's]"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Passages per question. \\[default: the index's]")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add what brought each passage its score, and the path to it.")
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            help="With --explain: folder for a drawing of each question's paths.", show_default=False
        ),
    ] = None,
    config: ConfigOption = None,
    parity: ParityOption = None,
    executor: Annotated[
        ExecutorName,
        typer.Option(
            help="Where questions are ranked; auto is this process for fewer than 2,000 questions, unless "
            "--workers is given, and else workers on this machine or, with --address, on a cluster."
        ),
    ] = ExecutorName.auto,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Parallel workers. \\[default: one per core]")
    ] = None,
    address: AddressOption = None,
    overrides: SetQuestionsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rank passages for every question of a file."""
    from hippoindex.pipeline.answer import answer_queries, write_answers, write_drawings
    from hippoindex.pipeline.config import ClusterConfig
    from hippoindex.pipeline.display import answers_view

    if svg is not None and not explain:
        raise UsageError("--svg draws explanations: ask for them with --explain")
    _require_folder(output)
    answers = answer_queries(
        index,
        queries,
        method=method,
        top_k=top_k,
        explain=explain,
        overrides=overrides or (),
        config=config,
        parity=parity.value if parity else None,
        cluster=ClusterConfig(executor=executor.value, workers=workers, address=address),
        work=None
        if output is None
        else output.with_name(f"{output.name}.work"),  # an interrupted run goes on
    )
    if output is not None:
        write_answers(answers, output)
    if svg is not None:
        write_drawings(answers, svg)
    if as_json:
        _print_json(answers.summary() if output else {"answers": answers.records()})
    elif output is None:
        Console().print(answers_view(answers))
    else:
        summary = answers.summary()
        typer.echo(
            f"{summary['queries']} questions, {summary['queries_per_s']} per second, written to {output}"
        )
        for remark in answers.remarks():
            typer.echo(remark)


@app.command()
def evaluate(
    index: IndexOption,
    queries: QueriesOption,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Of bm25, dense, hipporag1, hipporag2 and hippoindex, separated by commas. "
            "\\[default: all; with --parity bm25, dense and that one]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="JSON file to write, with a table (.md) and recall@k curves (.svg) beside it.",
            show_default=False,
        ),
    ] = None,
    allow_missing: AllowMissingOption = False,
    qa: Annotated[
        bool,
        typer.Option(
            "--qa",
            help="Have the reader (reader.engine, reader.model) answer every question out of each method's "
            "best passages: exact match and token F1.",
        ),
    ] = False,
    ircot_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measure each method also as the retriever of IRCoT, retrieving so often at most: 2 for "
            "HotpotQA and 2WikiMultiHopQA, 4 for MuSiQue. Needs a reader.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    parity: ParityOption = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD:METRIC>=PERCENT",
            help="Exit with 1 unless met, e.g. hippoindex:recall@5>=70. Repeatable.",
            show_default=False,
        ),
    ] = None,
    overrides: SetQuestionsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure recall of methods on questions with gold passages."""
    from hippoindex.pipeline.answer import evaluate_queries
    from hippoindex.pipeline.display import evaluation_table
    from hippoindex.pipeline.evaluation_report import report_files, write_report
    from hippoindex.pipeline.retrieve.engine import METHODS

    if output is not None:
        _require_folder(*report_files(output))
    demands = [_parse_demand(demand) for demand in require or ()]
    if methods is None:
        names = ["bm25", "dense", parity.value] if parity else list(METHODS)
    else:
        names = [name.strip() for name in methods.split(",") if name.strip()]
    report = evaluate_queries(
        index,
        queries,
        names,
        overrides=overrides or (),
        config=config,
        parity=parity.value if parity else None,
        allow_missing=allow_missing,
        qa=qa,
        ircot_steps=ircot_steps,
    )
    if output is not None:
        write_report(report, output)
    if as_json:
        _print_json(report)
    else:
        Console().print(evaluation_table(report))
    _check_demands(report, demands)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Report of `hippoindex evaluate`.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Another, on the same questions.", show_default=False)],
    method: Annotated[
        str | None,
        typer.Option(help="NAME, or FIRST:SECOND to compare two methods. \\[default: all that both have]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two evaluations question by question: differences, intervals, a permutation test."""
    from hippoindex.pipeline.compare import compare as compare_reports
    from hippoindex.pipeline.display import comparison_tables

    result = compare_reports(first, second, method)
    if as_json:
        _print_json(result)
    else:
        Console().print(comparison_tables(result))


@app.command()
def tune(
    index: IndexOption,
    queries: QueriesOption,
    output: Annotated[Path, typer.Option(help="YAML file to write.", show_default=False)],
    method: Annotated[str | None, typer.Option(help="The method to tune. \\[default: the index's]")] = None,
    metric: Annotated[
        str, typer.Option(help="What to raise, e.g. recall@2; several joined by + are averaged.")
    ] = "recall@5",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="A setting and its values. Repeatable. \\[default: passage_weight, entity_min_cosine and "
            "fact_top_k, three values each]",
            show_default=False,
        ),
    ] = None,
    folds: Annotated[int, typer.Option(min=2, help="Parts of the questions, each left out once.")] = 5,
    allow_missing: AllowMissingOption = False,
    overrides: SetQuestionsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search settings by cross-validation, and write the best with what it is worth on unseen questions."""
    from hippoindex.pipeline.answer import open_retriever, read_gold
    from hippoindex.pipeline.display import record_table
    from hippoindex.pipeline.tune import parse_grid, write_tuned
    from hippoindex.pipeline.tune import tune as tune_settings

    _require_folder(output)
    with closing(open_retriever(index, overrides or ())) as retriever:
        asked = read_gold(retriever.index, queries).queries
        name = method or retriever.config.method
        searched = parse_grid(grid) if grid else None
        result = tune_settings(
            retriever, asked, name, grid=searched, metric=metric, folds=folds, allow_missing=allow_missing
        )
    write_tuned(result, output)
    if as_json:
        _print_json(result)
    else:
        Console().print(record_table(result))


@app.command()
def evaluate_openie(
    gold: Annotated[
        Path | None,
        typer.Option(
            help="Gold tuples of CaRB: sentence, relation, arguments, separated by tabs.", show_default=False
        ),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="Passages, as for `hippoindex index`, that --reference is on.", show_default=False),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="OpenIE results on the passages, as HippoRAG writes them.", show_default=False),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; extract.* is used.")] = None,
    overrides: SetOption = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first sentences and passages. \\[default: all]")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.", show_default=False)] = None,
    require_f1: Annotated[
        float | None, typer.Option(min=0, max=100, help="Exit with 1 if CaRB's F1 is less, in percent.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure an extraction engine: CaRB scores, agreement with a reference extraction."""
    from hippoindex.pipeline.config import load_config
    from hippoindex.pipeline.display import openie_tables
    from hippoindex.pipeline.evaluate_openie import evaluate_openie as evaluate_engine
    from hippoindex.pipeline.evaluate_openie import write_openie_report

    _require_folder(output)
    if require_f1 is not None and gold is None:
        raise UsageError("--require-f1 needs --gold")
    settings = load_config(config, overrides or (), corpus__path=corpus or None)
    report = evaluate_engine(
        settings.extract,
        gold=gold,
        corpus=settings.corpus if corpus else None,
        reference=reference,
        limit=limit,
    )
    if output is not None:
        write_openie_report(report, output)
    if as_json:
        _print_json(report)
    else:
        Console().print(openie_tables(report))
    if require_f1 is not None and 100 * report["carb"]["f1"] < require_f1:
        raise ThresholdError(f"CaRB F1 is {100 * report['carb']['f1']:.1f}, required {require_f1}")


@app.command()
def inspect(
    directory: IndexArgument,
    phrase: Annotated[str | None, typer.Option(help="Show a phrase: passages, facts, synonyms.")] = None,
    passage: Annotated[str | None, typer.Option(help="Show a passage: text, phrases, facts.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare its SHA-256.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what an index holds."""
    from hippoindex.pipeline import display
    from hippoindex.pipeline.artifact import open_index

    if phrase is not None and passage is not None:
        raise UsageError("Give --phrase or --passage, not both")
    opened = open_index(directory)
    if verify:
        opened.verify()
    if phrase is None and passage is None:
        if as_json:
            _print_json(opened.manifest.model_dump(mode="json") | {"verified": verify})
        else:
            Console().print(display.index_overview(opened))
        return
    record = (
        display.phrase_record(opened, phrase)
        if phrase is not None
        else display.passage_record(opened, str(passage))
    )
    if as_json:
        _print_json(record)
    else:
        Console().print(display.record_table(record))


@app.command()
def quickstart(
    output: Annotated[Path, typer.Option(help="Folder for the sample's index.")] = Path("quickstart"),
    executor: Annotated[ExecutorName, typer.Option(help="Where stages run.")] = ExecutorName.auto,
) -> None:
    """Index the bundled sample corpus and answer its questions, with the paths that lead to the answers."""
    from hippoindex.pipeline.quickstart import run_quickstart

    with resources.as_file(resources.files("hippoindex") / "sample") as sample:
        run_quickstart(sample, output, executor.value, Console())


@app.command()
def verify(
    directory: IndexArgument,
    as_json: JsonOption = False,
) -> None:
    """Check every file, table, reference and sum of an index; exit with 2 if anything is wrong."""
    from hippoindex.pipeline.verify import verification_view, verify_index

    result = verify_index(directory)
    if as_json:
        _print_json(result.record())
    else:
        Console().print(verification_view(result))
    result.require_sound()


@app.command()
def export(
    index: IndexOption,
    form: Annotated[ExportFormat, typer.Option("--format", help="What to write.", show_default=False)],
    output: Annotated[
        Path, typer.Option(help="File or folder to write; must not exist.", show_default=False)
    ],
    llm_model: Annotated[
        str | None,
        typer.Option(
            help="hipporag: the llm_model_name under which it will look. \\[default: the extractor]"
        ),
    ] = None,
    embedding_model: Annotated[
        str | None,
        typer.Option(help="hipporag: likewise its embedding_model_name. \\[default: the embedding model]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write an index for another program: HippoRAG, FAISS, graph viewers, Neo4j, data frames."""
    from hippoindex.pipeline.export import export_index

    made = export_index(index, form.value, output, llm_model=llm_model, embedding_model=embedding_model)
    if as_json:
        _print_json(made)
    else:
        size = sum(made["files"].values()) / 2**20
        typer.echo(f"{len(made['files'])} files, {size:,.1f} MiB, written to {made['output']}")


@app.command()
def copy(
    source: IndexArgument,
    target: Annotated[
        str, typer.Argument(help="Folder or s3://bucket/prefix where there is nothing.", show_default=False)
    ],
) -> None:
    """Copy an index between folders and S3."""
    from hippoindex.pipeline.remote import copy as copy_index

    copy_index(source, target)
    typer.echo(f"{source} was copied to {target}")


@app.command()
def gc(
    output: IndexArgument,
    older_than_s: Annotated[float, typer.Option(min=0.0, help="Least age of what is listed.")] = 86400.0,
    work: Annotated[
        bool,
        typer.Option("--work", help="Also the work of a run that failed; a next run would go on from it."),
    ] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is listed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List what killed runs and replaced versions left beside an index, and on demand remove it."""
    from hippoindex.pipeline.collect import collect, record
    from hippoindex.pipeline.display import garbage_table

    found = collect(output, older_than_s=older_than_s, work=work, remove=delete)
    if as_json:
        _print_json(record(output, found, removed=delete))
    else:
        Console().print(garbage_table(found, removed=delete))


@models_app.command("fetch")
def models_fetch(
    names: Annotated[
        list[str] | None, typer.Argument(help="Models; by default all.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Get the models of the embedded default into the cache, verified against pinned SHA-256 values."""
    from hippoindex.pipeline.models import fetch_models

    fetched = fetch_models(names or None)
    if as_json:
        _print_json([{**model._asdict(), "path": str(model.path)} for model in fetched])
        return
    for model in fetched:
        typer.echo(f"{model.name}: {model.path} ({model.source})")


def _require_folder(*files: Path | None) -> None:
    """Refuse, before the work begins, files that could not be written at its end."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {file.parent}")
        if file is not None and file.is_dir():
            raise UsageError(f"{file} cannot be written: it is a folder")


def _parse_demand(text: str) -> tuple[str, str, float]:
    match = re.fullmatch(r"\s*([^:\s]+):([^>=\s]+)\s*>=\s*(\d+\.?\d*|\.\d+)\s*", text)
    if match is None:
        raise UsageError(f"--require {text!r}: expected METHOD:METRIC>=PERCENT, e.g. hippoindex:recall@5>=70")
    return match[1], match[2], float(match[3])


def _check_demands(report: dict[str, Any], demands: list[tuple[str, str, float]]) -> None:
    missed = []
    for method, metric, least in demands:
        value = report["methods"].get(method, {}).get(metric)
        if not isinstance(value, int | float):
            raise UsageError(f"--require {method}:{metric}: the report has no such figure")
        if value < least:
            missed.append(f"{method} {metric} is {value}, required {least}")
    if missed:
        raise ThresholdError("; ".join(missed))


def _show_build(result: BuildResult, as_json: bool) -> None:
    from hippoindex.pipeline.display import build_summary

    if as_json:
        counts = result.manifest.counts.model_dump()
        made = {"index": str(result.path), "changed": result.changed}
        _print_json({**made, "counts": counts, "stats": result.stats})
    elif result.changed:
        Console().print(build_summary(result))
    else:
        typer.echo(f"{result.path} is the index of this corpus and these settings already: nothing was done")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def main() -> None:
    """Run the command line and exit with its code.

    An error that nobody foresaw keeps its traceback; its code is 3, as 1 says that a threshold was not met.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        app()
    except HippoIndexError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error:[/] {_escaped(error)}")
        sys.exit(error.exit_code)
    except Exception:  # noqa: BLE001 - whatever it is, the code must not be 1
        traceback.print_exc()
        sys.exit(3)


def _interrupt(number: int, _: object) -> None:
    """End the work by an exception, so that workers are stopped and temporary files removed."""
    raise InterruptedRunError(number)


def _escaped(error: HippoIndexError) -> str:
    from rich.markup import escape

    return escape(str(error))


if __name__ == "__main__":
    main()
