"""Makes token shards of text: `shardwise prepare input=books/*.jsonl output=data/books`."""

from __future__ import annotations

from shardwise.data.prepare.inputs import split_words
from shardwise.data.prepare.options import PrepareConfig
from shardwise.data.prepare.run import prepare
from shardwise.process.signals import ends_as_at_ctrl_c
from shardwise.tools import read_words

HELP = """\
usage: shardwise prepare INPUT… output=FOLDER [key=value …]

Makes token shards of text, which train.py reads with data=token_shards data.directory=FOLDER.

INPUT, or input=INPUT,…: files, folders and patterns ('books/**/*.jsonl'; quote it where the shell objects).
  .txt and .md hold one document; .jsonl, .json and .ndjson hold a JSON object a line; these also with .gz or .zst
  behind; .parquet has a row a document. Of a folder all such files below it are taken, sorted by name.

  tokenizer=train           a byte-level BPE is trained on the inputs (the default)
  tokenizer=bytes           a token is a byte
  tokenizer=PATH            a tokenizer.json of Hugging Face's, or a folder with one, such as runs/first/tokenizer
  vocab_size=8192           tokens of a trained tokenizer (1,024 to 32,768, by the size of the inputs)
  field=text                the field or column that holds the text; field=title,body joins several
  validation=0.01           share of the documents that is held out, chosen by their text; 0: none
  end_of_document=TEXT      the token that ends a document, where the tokenizer does not name it
  on_error=stop|skip        at what is no document: stop, or leave it out and list it in the report
  processes=N               all CPUs; the shards are the same with any number
  shard_tokens=134217728    the most tokens of a file
  cut_texts=N               a .txt or .md file is cut at empty lines into documents of about N bytes (default: not)
  pad_vocabulary_to=N       the vocabulary that the shards state, at least the tokenizer's

Started again after an interruption, with the same words, it goes on from what is done.
"""


def run(words: list[str]) -> None:
    """Prepare what `words` say.

    Raises:
        ConfigError: a word is wrong, an input cannot be read, or the folder has other content.
    """
    inputs = [word.partition("=")[2] for word in words if word.startswith("input=")]
    with ends_as_at_ctrl_c():
        alone, config = read_words([word for word in words if not word.startswith("input=")], PrepareConfig)
        prepare([part for word in [*inputs, *alone] for part in split_words(word)], config)
