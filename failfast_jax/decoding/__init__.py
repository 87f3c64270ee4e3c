"""The compiled loop: state, draft, verify, commit. Pure functions over pytrees; nothing here knows about text."""
