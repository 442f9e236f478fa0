"""Makes what a worker has for images, where its model takes them: their rows, and the queue that encodes them.

Decides how images and steps share the cores. Does not know what is in an image.
"""

from __future__ import annotations

import torch

from model_worker.cpu.threads import ALL_THREADS, ThreadPool
from model_worker.model import LoadedModel
from model_worker.vision.cores import EncoderCores
from model_worker.vision.encode_queue import EncodeQueue
from model_worker.vision.encoder import EncoderCache
from model_worker.vision.rows import ImageRows


def image_rows(loaded: LoadedModel) -> ImageRows | None:
    """Make the rows of images; none for a model that takes no images."""
    if loaded.encoder is None:
        return None
    return ImageRows(loaded.encoder, EncoderCache(loaded.encoder.cache_bytes))


def encode_queue(images: ImageRows) -> EncodeQueue:
    """An image is encoded with half of the cores, and steps have the others meanwhile.

    While no step runs it takes all, if the features have the same bits with any number of cores.
    """
    encoder = images.encoder
    cores = torch.get_num_threads()
    beside = max(1, cores // 2)
    grows = encoder.device.type == "cpu" and encoder.bits_are_fixed

    def share(taken: int) -> None:
        ThreadPool.most_threads = max(1, cores - taken) if taken else ALL_THREADS

    return EncodeQueue(images, EncoderCores(encoder.layers(), beside, cores if grows else beside, share))
