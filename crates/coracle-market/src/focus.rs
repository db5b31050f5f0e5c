//! Charges as a FinOps Open Cost and Usage Specification table (FOCUS 1.0). Pure.

use std::collections::BTreeMap;
use std::ops::Range;

use coracle_auction::{Charge, Price};
use jiff::{Timestamp, civil::Date, tz::TimeZone};

/// Charge, with the other fields of its row.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) allocation: String,
    /// Market, `<instance type>/<region>`.
    pub(crate) market: String,
    pub(crate) from_ms: i64,
    pub(crate) to_ms: i64,
    pub(crate) price: Price,
    pub(crate) list: Price,
    /// Reason of the charge: usage, minimum or refund.
    pub(crate) reason: String,
}

/// Columns of FOCUS 1.0; there are no custom columns.
const COLUMNS: [&str; 43] = [
    "AvailabilityZone",
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "CommitmentDiscountCategory",
    "CommitmentDiscountId",
    "CommitmentDiscountName",
    "CommitmentDiscountStatus",
    "CommitmentDiscountType",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "ListUnitPrice",
    "PricingCategory",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "RegionId",
    "RegionName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceCategory",
    "ServiceName",
    "SkuId",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "Tags",
];

const PROVIDER: &str = "Coracle";

/// Table of a tenant's charges in a span, as comma-separated values. A charge is split where the span or a calendar month (UTC)
/// ends. The costs of an allocation are rounded together, so that they add up to its exact charge rounded once.
pub(crate) fn csv(tenant: &str, items: &[Item], span: &Range<i64>) -> String {
    let mut table = COLUMNS.join(",") + "\n";
    let mut sums: BTreeMap<&str, [Running; 2]> = BTreeMap::new();
    for item in items {
        let [billed, list] = sums.entry(&item.allocation).or_default();
        for (from_ms, to_ms) in months(item.from_ms.max(span.start)..item.to_ms.min(span.end)) {
            let costs = Costs {
                billed: billed.add(item.price, to_ms - from_ms, item.is_credit()),
                list: list.add(item.list, to_ms - from_ms, item.is_credit()),
            };
            let part = Item { from_ms, to_ms, ..item.clone() };
            table += &row(tenant, &part, costs);
        }
    }
    table
}

impl Item {
    fn is_credit(&self) -> bool {
        self.reason == "refund"
    }
}

/// Exact sum, and the part of it that was already output in whole micro-dollars.
#[derive(Clone, Copy, Debug, Default)]
struct Running {
    sum: Charge,
    told: i128,
}

impl Running {
    /// Adds a charge of `ms` milliseconds, and returns the amount to output for it.
    fn add(&mut self, price: Price, ms: i64, is_credit: bool) -> Price {
        let more = Charge::of(price, u64::try_from(ms).unwrap_or(0)).0;
        self.sum.0 = self.sum.0.saturating_add(if is_credit { -more } else { more });
        let told = self.sum.to_micros() - self.told;
        self.told += told;
        Price::micros(i64::try_from(told).unwrap_or(i64::MAX))
    }
}

#[derive(Clone, Copy, Debug)]
struct Costs {
    billed: Price,
    list: Price,
}

/// First and last millisecond of the month that contains a time.
fn month(ms: i64) -> Option<Range<i64>> {
    let at = Timestamp::from_millisecond(ms).ok()?;
    let first = at.to_zoned(TimeZone::UTC).date().first_of_month();
    let next = first.last_of_month().tomorrow().ok()?;
    let begin = |date: Date| Some(date.to_zoned(TimeZone::UTC).ok()?.timestamp().as_millisecond());
    Some(begin(first)?..begin(next)?)
}

/// Parts of a span, split at the ends of months.
fn months(span: Range<i64>) -> Vec<(i64, i64)> {
    let (mut parts, mut from) = (Vec::new(), span.start);
    while from < span.end {
        let end = month(from).map_or(span.end, |month| month.end.min(span.end));
        parts.push((from, end));
        from = end;
    }
    parts
}

fn time(ms: i64) -> String {
    Timestamp::from_millisecond(ms).map(|at| at.to_string()).unwrap_or_default()
}

/// Converts milliseconds to hours with nine decimals.
fn hours(ms: i64) -> String {
    let nanohours = (i128::from(ms) * 1_000_000_000 + 1_800_000) / 3_600_000;
    format!("{}.{:09}", nanohours / 1_000_000_000, nanohours % 1_000_000_000)
}

fn row(tenant: &str, item: &Item, costs: Costs) -> String {
    let (kind, region) = item.market.split_once('/').unwrap_or((&item.market, ""));
    let account = tenant.split('/').next().unwrap_or(tenant);
    let period = month(item.from_ms).unwrap_or(item.from_ms..item.to_ms);
    let ms = item.to_ms - item.from_ms;
    // A credit has no consumed quantity and no price of its own.
    let used = |text: String| if item.is_credit() { String::new() } else { text };
    let what = match item.reason.as_str() {
        "minimum" => "the rest of the first minute of a node",
        "refund" => "given back: the node was lost within its first minutes",
        _ => "a node bought at auction",
    };
    let cell = |column: &str| match column {
        "BilledCost" | "ContractedCost" | "EffectiveCost" => costs.billed.to_string(),
        "ListCost" => costs.list.to_string(),
        "BillingAccountId" | "BillingAccountName" => account.to_owned(),
        "SubAccountId" | "SubAccountName" => tenant.to_owned(),
        "BillingCurrency" => "USD".to_owned(),
        "BillingPeriodStart" => time(period.start),
        "BillingPeriodEnd" => time(period.end),
        "ChargePeriodStart" => time(item.from_ms),
        "ChargePeriodEnd" => time(item.to_ms),
        "ChargeCategory" => if item.is_credit() { "Credit" } else { "Usage" }.to_owned(),
        "ChargeDescription" => format!("{}: {what}", item.market),
        "ChargeFrequency" => "Usage-Based".to_owned(),
        "ConsumedQuantity" => used(format!("{}.{:03}", ms / 1000, ms % 1000)),
        "ConsumedUnit" => used("Seconds".to_owned()),
        "ContractedUnitPrice" => used(item.price.to_string()),
        "ListUnitPrice" => used(item.list.to_string()),
        "PricingCategory" => "Dynamic".to_owned(),
        "PricingQuantity" => used(hours(ms)),
        "PricingUnit" => used("Hours".to_owned()),
        "InvoiceIssuerName" | "ProviderName" | "PublisherName" => PROVIDER.to_owned(),
        "RegionId" | "RegionName" => region.to_owned(),
        "ResourceId" => item.allocation.clone(),
        "ResourceType" => "Node".to_owned(),
        "ServiceCategory" => "Compute".to_owned(),
        "ServiceName" => "Coracle Market".to_owned(),
        "SkuId" => kind.to_owned(),
        "SkuPriceId" => item.market.clone(),
        _ => String::new(),
    };
    let cells: Vec<_> = COLUMNS.iter().map(|column| quote_cell(&cell(column))).collect();
    cells.join(",") + "\n"
}

/// Quotes a cell if necessary: names of tenants may contain any character.
fn quote_cell(text: &str) -> String {
    if text.contains(['"', ',', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOVEMBER: i64 = 1_793_491_200_000;
    const HOUR: i64 = 3_600_000;
    const ALL: Range<i64> = 0..i64::MAX;

    fn item(from_ms: i64, to_ms: i64, price: &str, reason: &str) -> Item {
        Item {
            allocation: "01ALLOC".into(),
            market: "a100-4x/local".into(),
            from_ms,
            to_ms,
            price: Price::parse(price).unwrap(),
            list: Price::parse("8").unwrap(),
            reason: reason.into(),
        }
    }

    /// Parses a table into rows by column.
    fn read(table: &str) -> Vec<BTreeMap<String, String>> {
        let mut lines = table.lines();
        let header: Vec<_> = lines.next().unwrap().split(',').collect();
        let row = |line: &str| {
            let cells: Vec<_> = line.split(',').collect();
            assert_eq!(cells.len(), header.len(), "{line}");
            header.iter().zip(cells).map(|(h, c)| ((*h).to_owned(), c.to_owned())).collect()
        };
        lines.map(row).collect()
    }

    #[test]
    fn node_hour_is_one_focus_row() {
        let rows = read(&csv("prod/team-ml", &[item(NOVEMBER, NOVEMBER + HOUR, "2.5", "usage")], &ALL));
        assert_eq!(rows.len(), 1);
        for (column, want) in [
            ("BilledCost", "2.5000"),
            ("EffectiveCost", "2.5000"),
            ("ListCost", "8.0000"),
            ("BillingAccountId", "prod"),
            ("SubAccountId", "prod/team-ml"),
            ("BillingPeriodStart", "2026-11-01T00:00:00Z"),
            ("BillingPeriodEnd", "2026-12-01T00:00:00Z"),
            ("ChargePeriodStart", "2026-11-01T00:00:00Z"),
            ("ChargePeriodEnd", "2026-11-01T01:00:00Z"),
            ("ChargeCategory", "Usage"),
            ("PricingCategory", "Dynamic"),
            ("PricingQuantity", "1.000000000"),
            ("ConsumedQuantity", "3600.000"),
            ("ContractedUnitPrice", "2.5000"),
            ("RegionId", "local"),
            ("SkuId", "a100-4x"),
            ("ResourceId", "01ALLOC"),
            ("CommitmentDiscountId", ""),
        ] {
            assert_eq!(rows[0][column], want, "{column}");
        }
    }

    #[test]
    fn charge_is_split_at_month_end_and_clipped_to_the_span() {
        let rows = read(&csv("t", &[item(NOVEMBER - HOUR, NOVEMBER + HOUR, "2", "usage")], &ALL));
        let periods: Vec<_> = rows.iter().map(|r| (&*r["BillingPeriodStart"], &*r["BilledCost"])).collect();
        assert_eq!(periods, [("2026-10-01T00:00:00Z", "2.0000"), ("2026-11-01T00:00:00Z", "2.0000")]);
        let november = NOVEMBER..NOVEMBER + HOUR / 2;
        let rows = read(&csv("t", &[item(NOVEMBER - HOUR, NOVEMBER + HOUR, "2", "usage")], &november));
        assert_eq!((rows.len(), &*rows[0]["BilledCost"]), (1, "1.0000"));
        assert_eq!(csv("t", &[item(0, HOUR, "2", "usage")], &november).lines().count(), 1);
    }

    #[test]
    fn slot_costs_sum_to_the_charge_rounded_once() {
        let third = |n: i64| item(NOVEMBER + n, NOVEMBER + n + 1, "0.7", "usage");
        let items: Vec<_> = (0..1000).map(third).collect();
        let exact = Charge::of(Price::parse("0.7").unwrap(), 1000).to_micros();
        let micros = |rows: &[BTreeMap<String, String>]| -> i128 {
            let cost =
                |r: &BTreeMap<String, String>| r["BilledCost"].replace('.', "").parse::<i128>().unwrap();
            let digits = |r: &BTreeMap<String, String>| r["BilledCost"].split('.').nth(1).unwrap().len();
            rows.iter().map(|r| cost(r) * 10i128.pow(6 - u32::try_from(digits(r)).unwrap())).sum()
        };
        assert_eq!(micros(&read(&csv("t", &items, &ALL))), exact);
        let back =
            [item(NOVEMBER, NOVEMBER + HOUR, "2", "usage"), item(NOVEMBER, NOVEMBER + HOUR, "2", "refund")];
        let rows = read(&csv("t", &back, &ALL));
        assert_eq!((&*rows[1]["ChargeCategory"], &*rows[1]["BilledCost"]), ("Credit", "-2.0000"));
        assert_eq!((&*rows[1]["PricingQuantity"], micros(&rows)), ("", 0));
    }

    #[test]
    fn tenant_names_are_csv_quoted() {
        let table = csv("a,\"b\"", &[item(NOVEMBER, NOVEMBER + 1, "2", "usage")], &ALL);
        assert!(table.contains("\"a,\"\"b\"\"\""), "{table}");
    }
}
