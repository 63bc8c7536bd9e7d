# SPDX-License-Identifier: Apache-2.0
"""A small Keras model, as NVFlare's TensorFlow recipe takes it."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.keras import layers


class KerasNet(tf.keras.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self._input_shape = (None, 4)
        self.add(layers.Dense(8, kernel_initializer=tf.keras.initializers.GlorotUniform(seed=1), name="hidden"))
        self.add(layers.Dense(2, kernel_initializer=tf.keras.initializers.GlorotUniform(seed=2), name="out"))
