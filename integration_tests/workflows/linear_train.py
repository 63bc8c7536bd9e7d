# SPDX-License-Identifier: Apache-2.0
"""A client of scikit-learn: the first global model has settings, the others what the classifiers have learned."""

from __future__ import annotations

import numpy as np
import nvflare.client as flare
from sklearn.linear_model import SGDClassifier


def main() -> None:
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    generator = np.random.default_rng(site)
    x = generator.normal(size=(64, 5))
    y = (x.sum(axis=1) > 0).astype(int)
    model = SGDClassifier(max_iter=1, tol=None, warm_start=True, random_state=0)
    model.classes_, model.coef_, model.intercept_ = np.array([0, 1]), np.zeros((1, 5)), np.zeros(1)
    while flare.is_running():
        received = flare.receive()
        if "coef" in received.params:
            model.coef_, model.intercept_ = (np.array(received.params[name]) for name in ("coef", "intercept"))
        model.fit(x, y)
        params = {"coef": model.coef_, "intercept": model.intercept_}
        metrics = {"accuracy": model.score(x, y)}
        flare.send(flare.FLModel(params=params, metrics=metrics, meta={"NUM_STEPS_CURRENT_ROUND": 64}))


if __name__ == "__main__":
    main()
