//! Output formats of `-o`.

use std::ffi::OsStr;
use std::str::FromStr;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser, ValueParserFactory};

use crate::output::jsonpath::Template;

/// Output format of `-o`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Columns for terminals.
    #[default]
    Table,
    /// More columns.
    Wide,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
    /// Names only.
    Name,
    /// Parts of the JSON document, like kubectl's `-o jsonpath=`.
    JsonPath(Template),
}

impl Format {
    /// Returns whether the format prints columns, not a document.
    pub fn is_table(&self) -> bool {
        matches!(self, Self::Table | Self::Wide)
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "table" => Ok(Self::Table),
            "wide" => Ok(Self::Wide),
            "json" => Ok(Self::Json),
            "yaml" => Ok(Self::Yaml),
            "name" => Ok(Self::Name),
            _ => match text.strip_prefix("jsonpath=") {
                Some(template) => template.parse().map(Self::JsonPath),
                None => Err("write table, wide, json, yaml, name or jsonpath=TEMPLATE".to_owned()),
            },
        }
    }
}

/// Parses a format, and lists the values for completion scripts.
#[derive(Clone, Debug)]
pub struct FormatParser;

impl TypedValueParser for FormatParser {
    type Value = Format;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Format, clap::Error> {
        StringValueParser::new().try_map(|text: String| text.parse::<Format>()).parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let words = ["table", "wide", "json", "yaml", "name", "jsonpath="];
        Some(Box::new(words.into_iter().map(PossibleValue::new)))
    }
}

impl ValueParserFactory for Format {
    type Parser = FormatParser;

    fn value_parser() -> FormatParser {
        FormatParser
    }
}
