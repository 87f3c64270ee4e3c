"""Published data: question sets, shapes of public models, and the paper's acceptance statistics."""
