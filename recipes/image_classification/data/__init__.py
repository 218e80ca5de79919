"""The data: scikit-learn's digits, a folder of images a class, tar shards, or noise for measuring.

Every data set is indexed (`__getitem__`, `__len__`): which sample comes when is the library's, a function of seed and
samples consumed. Workers decode to uint8 of one size; everything random happens later, on the device (augment.py).
"""

from recipes.image_classification.data.base import ImageData, Sample
from recipes.image_classification.data.decoding import UndecodableImage, decode
from recipes.image_classification.data.folder import ImageFolder
from recipes.image_classification.data.image_files import ImageFiles
from recipes.image_classification.data.in_memory import Digits, InMemory, SyntheticImages
from recipes.image_classification.data.tar_index import load_tar_index, read_tar_index
from recipes.image_classification.data.webdataset import WebDataset

__all__ = [
    "Digits",
    "ImageData",
    "ImageFiles",
    "ImageFolder",
    "InMemory",
    "Sample",
    "SyntheticImages",
    "UndecodableImage",
    "WebDataset",
    "decode",
    "load_tar_index",
    "read_tar_index",
]
