"""The async SDK. Users import from `dsec`; `dsec.sync` has the same without `await`."""
