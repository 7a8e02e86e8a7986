"""The recorder of what HF's models dispatch, for predict: model_specs/operators."""
