//! Entry points of the fuzz targets; not part of the API. Each accepts any bytes, keeps nothing, and panics when a rule is
//! broken.
