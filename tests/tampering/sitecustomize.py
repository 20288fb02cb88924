"""Changes one expert's weights by 1e-3 in every engine that is started with this folder on PYTHONPATH.

Python imports `sitecustomize` when it starts. The change is made after the engine took and checked a
publication, as a fault of the engine's memory or of its kernels' packing would be.
"""

import importlib.abc
import importlib.util
import sys


def _tamper_core(module):
    load = module.CoreEngineModel.load_weights

    def load_and_tamper(self, paths, checksums):
        import torch

        load(self, paths, checksums)
        with torch.no_grad():
            block = self._module.portable_blocks()[-1]
            block.routed_experts.w_down[3] += 1e-3

    module.CoreEngineModel.load_weights = load_and_tamper


def _tamper_vllm(module):
    load = module.load_into

    def load_and_tamper(model, model_config, tensors):
        import torch

        load(model, model_config, tensors)
        layer = [part for part in model.modules() if hasattr(part, "w2_weight")][-1]
        with torch.no_grad():
            layer.w2_weight[3] += 1e-3

    module.load_into = load_and_tamper


_TARGETS = {
    "miles_olmo.policy.generation": _tamper_core,
    "miles_olmo.serving.weights": _tamper_vllm,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in _TARGETS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def execute_and_tamper(module):
            execute(module)
            _TARGETS[name](module)

        spec.loader.exec_module = execute_and_tamper
        return spec


sys.meta_path.insert(0, _Finder())
