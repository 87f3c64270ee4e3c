"""Its presence puts this folder on the import path: tests share helpers such as `checkpoint_files`."""
