//! Screen of a VM over RFB (RFC 6143): frames and keys.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout_at};
use vnc::{PixelFormat, Rect, VncClient, VncConnector, VncEncoding, VncError, VncEvent, X11Event};

use crate::build_file::Area;
use crate::keys::KeyEvent;

/// Longest wait for the response to a frame request. A server without changes does not respond.
const ANSWER: Duration = Duration::from_millis(300);
/// Time limit of the handshake.
const CONNECT: Duration = Duration::from_secs(20);
/// Bytes per pixel that the server is asked to send: blue, green, red, unused.
const WIRE_PIXEL: usize = 4;
/// Bytes per pixel of a [`Frame`].
const PIXEL: usize = 3;

/// Error of a screen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScreenError {
    /// The connection or the protocol failed.
    #[error("the screen does not answer")]
    Rfb(#[source] VncError),
    /// The server reported an error.
    #[error("the screen does not answer: {0}")]
    Server(String),
    /// The handshake took too long.
    #[error("the screen did not answer within {} s", CONNECT.as_secs())]
    Silent,
    /// A PNG file cannot be read or written.
    #[error("{operation} {path}")]
    File {
        /// Operation.
        operation: &'static str,
        /// Path of the file.
        path: String,
        /// Cause.
        source: io::Error,
    },
}

impl From<VncError> for ScreenError {
    fn from(error: VncError) -> Self {
        Self::Rfb(error)
    }
}

/// Content of a screen: rows of pixels from the top, three bytes per pixel: red, green, blue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl Frame {
    fn blank(width: usize, height: usize) -> Self {
        Self { width, height, pixels: vec![0; width * height * PIXEL] }
    }

    /// Width and height, pixels.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        (self.width, self.height)
    }

    /// Number of distinct colours.
    #[must_use]
    pub fn colours(&self) -> usize {
        let mut all: Vec<_> = self.pixels.chunks_exact(PIXEL).collect();
        all.sort_unstable();
        all.dedup();
        all.len()
    }

    fn row(&self, y: usize, from: usize, pixels: usize) -> Option<&[u8]> {
        let start = (y * self.width + from) * PIXEL;
        self.pixels.get(start..start + pixels * PIXEL)
    }

    /// Draws a rectangle. Pixels outside the frame are ignored.
    fn put(&mut self, rect: Rect, data: &[u8]) {
        let (x, y, width) = (usize::from(rect.x), usize::from(rect.y), usize::from(rect.width));
        for (n, row) in data.chunks_exact((width * WIRE_PIXEL).max(1)).enumerate() {
            let start = ((y + n) * self.width + x) * PIXEL;
            let shown = width.min(self.width.saturating_sub(x));
            let Some(to) = self.pixels.get_mut(start..start + shown * PIXEL) else { return };
            for (to, from) in to.chunks_exact_mut(PIXEL).zip(row.chunks_exact(WIRE_PIXEL)) {
                if let ([red, green, blue], [b, g, r, _]) = (to, from) {
                    (*red, *green, *blue) = (*r, *g, *b);
                }
            }
        }
    }

    /// Copies a rectangle within the frame.
    fn copy(&mut self, to: Rect, from: Rect) {
        let before = self.clone();
        let (x, width) = (usize::from(to.x), usize::from(to.width).min(usize::from(from.width)));
        for n in 0..usize::from(to.height).min(usize::from(from.height)) {
            let start = ((usize::from(to.y) + n) * self.width + x) * PIXEL;
            let row = before.row(usize::from(from.y) + n, usize::from(from.x), width);
            let place = self.pixels.get_mut(start..start + width * PIXEL);
            if let (Some(place), Some(row)) = (place, row) {
                place.copy_from_slice(row);
            }
        }
    }

    /// Share of pixels of an area in which two frames differ, from 0 to 1. Frames of different sizes differ in all pixels.
    #[must_use]
    pub fn difference(&self, other: &Self, area: Option<Area>) -> f64 {
        let whole = Area { x: 0, y: 0, width: count(self.width), height: count(self.height) };
        let Area { x, y, width, height } = area.unwrap_or(whole);
        let (x, y, width, height) = (index(x), index(y), index(width), index(height));
        if self.size() != other.size() || width * height == 0 {
            return 1.0;
        }
        let mut differing = 0;
        for row in y..y + height {
            let (Some(mine), Some(its)) = (self.row(row, x, width), other.row(row, x, width)) else {
                return 1.0; // the area is not on the screen
            };
            let pairs = mine.chunks_exact(PIXEL).zip(its.chunks_exact(PIXEL));
            differing += pairs.filter(|(a, b)| a != b).count();
        }
        share(differing, width * height)
    }

    /// Writes a PNG file.
    ///
    /// # Errors
    /// [`ScreenError::File`].
    pub fn write_png(&self, path: &Path) -> Result<(), ScreenError> {
        let failed =
            |source| ScreenError::File { operation: "write", path: path.display().to_string(), source };
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, count(self.width), count(self.height));
        encoder.set_color(png::ColorType::Rgb);
        let encoded = encoder.write_header().and_then(|mut writer| writer.write_image_data(&self.pixels));
        encoded.map_err(|error| failed(io::Error::other(error)))?;
        std::fs::write(path, bytes).map_err(failed)
    }

    /// Reads a PNG file with eight bits per colour, as [`Frame::write_png`] writes it.
    ///
    /// # Errors
    /// [`ScreenError::File`].
    pub fn read_png(path: &Path) -> Result<Self, ScreenError> {
        let failed =
            |source| ScreenError::File { operation: "read", path: path.display().to_string(), source };
        let file = std::fs::File::open(path).map_err(failed)?;
        let invalid = |error: png::DecodingError| failed(io::Error::other(error));
        let mut decoder = png::Decoder::new(io::BufReader::new(file));
        decoder.set_transformations(png::Transformations::normalize_to_color8());
        let mut reader = decoder.read_info().map_err(invalid)?;
        let other =
            || failed(io::Error::new(io::ErrorKind::InvalidData, "not a picture of red, green and blue"));
        let mut bytes = vec![0; reader.output_buffer_size().ok_or_else(other)?];
        let info = reader.next_frame(&mut bytes).map_err(invalid)?;
        let channels = info.color_type.samples();
        if channels < PIXEL {
            return Err(other());
        }
        let pixels = bytes.chunks_exact(channels).flat_map(|pixel| pixel.iter().take(PIXEL).copied());
        Ok(Self { width: index(info.width), height: index(info.height), pixels: pixels.collect() })
    }
}

#[expect(clippy::cast_precision_loss, reason = "a frame has fewer pixels than a float has digits")]
fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole as f64
}

fn count(pixels: usize) -> u32 {
    u32::try_from(pixels).unwrap_or(u32::MAX)
}

fn index(pixels: u32) -> usize {
    usize::try_from(pixels).unwrap_or(usize::MAX)
}

/// Connection to a screen.
pub struct Screen {
    client: VncClient,
    frame: Frame,
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen").field("size", &self.frame.size()).finish_non_exhaustive()
    }
}

impl Screen {
    /// Connects to a server that requires no password.
    ///
    /// # Errors
    /// Errors of the server and its protocol.
    pub async fn connect<S>(stream: S) -> Result<Self, ScreenError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + Sync + 'static,
    {
        let connector = VncConnector::new(stream)
            .set_auth_method(async { Err(VncError::NoPassword) })
            .set_pixel_format(PixelFormat::bgra())
            .add_encoding(VncEncoding::CopyRect)
            .add_encoding(VncEncoding::Raw)
            .add_encoding(VncEncoding::DesktopSizePseudo)
            .build()?;
        let started = tokio::time::timeout(CONNECT, connector.try_start()).await;
        let client = started.map_err(|_| ScreenError::Silent)??.finish()?;
        let mut screen = Self { client, frame: Frame::default() };
        screen.refresh().await?;
        Ok(screen)
    }

    /// Updates and returns the current frame. Cancel-safe: a late response becomes part of the next frame.
    ///
    /// # Errors
    /// Errors of the server and its protocol.
    pub async fn refresh(&mut self) -> Result<&Frame, ScreenError> {
        self.client.input(X11Event::Refresh).await?;
        let deadline = Instant::now() + ANSWER;
        while let Ok(event) = timeout_at(deadline, self.client.recv_event()).await {
            match event? {
                VncEvent::SetResolution(size) => {
                    self.frame = Frame::blank(size.width.into(), size.height.into());
                    self.client.input(X11Event::FullRefresh).await?;
                }
                VncEvent::RawImage(rect, data) => self.frame.put(rect, &data),
                VncEvent::Copy(to, from) => self.frame.copy(to, from),
                VncEvent::Error(why) => return Err(ScreenError::Server(why)),
                _ => {}
            }
        }
        Ok(&self.frame)
    }

    pub(crate) async fn key(&self, event: KeyEvent) -> Result<(), ScreenError> {
        let KeyEvent { keysym, down } = event;
        Ok(self.client.input(X11Event::KeyEvent((keysym, down).into())).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rect(x: u16, y: u16, width: u16, height: u16) -> Rect {
        Rect { x, y, width, height }
    }

    #[test]
    fn rectangles_are_put_and_copied_in_place() {
        let mut frame = Frame::blank(4, 3);
        frame.put(rect(1, 1, 2, 1), &[3, 2, 1, 0, 6, 5, 4, 0]);
        assert_eq!(frame.row(1, 1, 2), Some(&[1, 2, 3, 4, 5, 6][..]));
        frame.copy(rect(0, 2, 2, 1), rect(1, 1, 2, 1));
        assert_eq!(frame.row(2, 0, 2), frame.clone().row(1, 1, 2));
        // A rectangle outside the frame, as a faulty server may send it, changes nothing else.
        let before = frame.clone();
        frame.put(rect(0, 9, 4, 1), &[9; 16]);
        frame.copy(rect(0, 8, 4, 4), rect(0, 0, 4, 4));
        assert_eq!(frame, before);
    }

    #[test]
    fn difference_is_a_share_of_the_area() {
        let (mut frame, blank) = (Frame::blank(4, 4), Frame::blank(4, 4));
        frame.put(rect(0, 0, 1, 1), &[1, 1, 1, 0]);
        let area = |x, y, width, height| Some(Area { x, y, width, height });
        for (area, want) in
            [(None, 1.0 / 16.0), (area(0, 0, 2, 1), 0.5), (area(1, 1, 3, 3), 0.0), (area(3, 3, 9, 1), 1.0)]
        {
            let difference = frame.difference(&blank, area);
            assert!((difference - want).abs() < 1e-9, "{area:?}: {difference}");
        }
        assert!((frame.difference(&Frame::blank(4, 5), None) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn png_round_trip_preserves_the_frame() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.png");
        let mut frame = Frame::blank(5, 2);
        frame.put(rect(2, 1, 1, 1), &[30, 20, 10, 0]);
        frame.write_png(&path).unwrap();
        assert_eq!(Frame::read_png(&path).unwrap(), frame);
        std::fs::write(&path, b"no picture").unwrap();
        assert!(Frame::read_png(&path).is_err());
        assert!(frame.write_png(&dir.path().join("no/dir.png")).is_err());
    }
}
