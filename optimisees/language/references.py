"""Studies of language models: perplexities and speed, beside n-gram models of the same texts."""

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from l2lopt.core.errors import UserError
from l2lopt.core.references import Column, Reference, References, Result, StudyRun
from l2lopt.core.types import Report
from l2lopt.optimisee import evaluate_split
from optimisees.data.text import EOS
from optimisees.language.n_grams import KneserNey


class NGrams(References):
    """Perplexities on the validation and the test text, beside Kneser-Ney models of the same texts."""

    default_seeds: ClassVar[tuple[int, ...]] = (0,)

    n_grams: list[PositiveInt] = Field(default=[1, 5])
    """Orders of the Kneser-Ney models; 1 is a unigram model."""

    def check(self, optimisees: Mapping[str, Any]) -> None:
        """Refuses models of different texts: their perplexities could not be compared.

        Raises:
            UserError: For texts other than the first model's, or another length of the evaluation.
        """
        first = next(iter(optimisees.values()))
        for label, model in optimisees.items():
            if (model.fingerprint(), model.evaluation_tokens) != (first.fingerprint(), first.evaluation_tokens):
                remedy = "make studies of their own"
                raise UserError(f"study: {label}", expected="the texts of the first run", found="others", remedy=remedy)

    def beside_all(self) -> Sequence[Reference]:
        """A model for each order."""
        labels = {order: "unigram" if order == 1 else f"Kneser-Ney {order}-gram" for order in self.n_grams}
        return [Reference(f"{order}-gram", label, f"{order}-gram") for order, label in labels.items()]

    def depends_on(self, kind: str) -> dict[str, Any]:
        """The order of an n-gram model; of a trained one that it is read on the validation text whatever it watched."""
        return {"valid": "heldout"} if kind == "trained" else {"kind": kind}

    def result(self, optimisee: Any, run: StudyRun, report: Report) -> Result:
        """Perplexities "valid" and "test"; of a trained model its "counts" of parameters and "speed" too."""
        if run.trained is None:
            return n_gram(optimisee, int(run.kind.removesuffix("-gram")))
        # What training has watched is the test text where nothing is chosen by it.
        valid = evaluate_split(optimisee, "heldout", run.seed, run.trained.params, run.trained.aux)["perplexity"]
        test = run.trained.metrics["perplexity"]
        return {"valid": valid, "test": test, "counts": list(optimisee.counts()), "speed": run.trained.speed}

    def columns(self, result: Result) -> Sequence[Column]:
        """Parameters, perplexities, tokens per second, and the difference from another run."""
        test = Column("test perplexity", itemgetter("test"), digits=1)
        return [
            Column("seeds", show="count"),
            Column("recurrent parameters", _recurrent, "first"),
            Column("in all", _total, "first"),
            Column("validation perplexity", itemgetter("valid"), digits=1),
            test,
            Column("tokens/s", itemgetter("speed"), "median"),
            test._replace(head="", show="versus"),
        ]

    def facts(self, found: Mapping[str, Mapping[str, Result]], references: Collection[str]) -> Any:
        """The runs and the n-gram models apart, the latter by their order."""
        runs = {label: own for label, own in found.items() if label not in references}
        models = {
            reference.kind.removesuffix("-gram"): next(iter(found[reference.label].values()))
            for reference in self.beside_all()
        }
        return {"runs": runs, "n_grams": models}


def n_gram(model: Any, order: int) -> dict[str, float]:
    """Perplexities "valid" and "test" of a Kneser-Ney model, on the tokens that `model` is evaluated on."""
    texts, tokens = model.texts, model.texts.vocabulary.tokens
    smoothed = KneserNey(texts.train.numpy(), len(tokens), tokens.index(EOS), order)
    read = {"valid": texts.valid[: model.evaluation_tokens], "test": texts.test[: model.evaluation_tokens]}
    return {name: smoothed.perplexity(text.numpy()) for name, text in read.items()}


def _total(result: Result) -> int:
    total, _, _ = result["counts"]
    return int(total)


def _recurrent(result: Result) -> str:
    """The recurrent parameters, and after a plus those of gate biases, which the papers' counts leave out."""
    _, recurrent, gate_biases = map(int, result["counts"])
    return f"{recurrent:,}" + (f" + {gate_biases:,}" if gate_biases else "")
