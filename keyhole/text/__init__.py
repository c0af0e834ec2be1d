"""From words to numbers: corpora, tokenizers, generated tasks and batches."""

from keyhole.text.batches import open_dataset
from keyhole.text.contract import Tokenizer
from keyhole.text.corpus import Corpus, read_corpus
from keyhole.text.dataset import NO_TARGET, Batch, Dataset
from keyhole.text.documents import documents
from keyhole.text.tasks import TASKS, Task, build_task
from keyhole.text.tokenizers import TOKENIZER_OPTIONS, build_tokenizer, load_tokenizer, save_tokenizer
from keyhole.text.tokens import cache_folder, token_file

__all__ = [
    "NO_TARGET",
    "TASKS",
    "TOKENIZER_OPTIONS",
    "Batch",
    "Corpus",
    "Dataset",
    "Task",
    "Tokenizer",
    "build_task",
    "build_tokenizer",
    "cache_folder",
    "documents",
    "load_tokenizer",
    "open_dataset",
    "read_corpus",
    "save_tokenizer",
    "token_file",
]
